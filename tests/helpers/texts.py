"""Short reviews that a tiny classifier can learn, and a long one."""

GOOD, BAD = ["good", "great", "fine", "witty", "warm"], ["bad", "dull", "slow", "poor", "flat"]
SUBJECTS = ["film", "movie", "story", "plot"]
TEXTS = [
    f"the {s} is {w} and {v}" for s in SUBJECTS for words in (GOOD, BAD) for w in words for v in words[:3]
]
LABELS = ["pos" if any(word in text.split() for word in GOOD) else "neg" for text in TEXTS]
LONG = "a warm and witty film , but the plot is so slow ! " * 20
