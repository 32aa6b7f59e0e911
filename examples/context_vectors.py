"""Long-term context: a few vectors carry information from one segment of a long sequence to the next.

    context <- routing(context, segment)

The context has a fixed size, however long the sequence is, and each segment is routed once. Credit composes
over the segments, so each symbol of the whole sequence has a credit for each context vector.

In this example a network reads a long sequence in short segments. The sequence contains one mark. At the end
the network must name the symbol that came after the mark.

Run: python examples/context_vectors.py
"""

import torch
from torch import Tensor, nn

import vecroute as vr

N_SYMBOLS, MARK = 4, 4


class Reader(nn.Module):
    """Read segments one after the other, with n_context vectors of size d as memory."""

    def __init__(self, *, n_context: int, n_segment: int, d: int):
        super().__init__()
        self.start = nn.Parameter(torch.randn(n_context, d))
        self.embed = nn.Embedding(2 * (N_SYMBOLS + 1), d)
        # The first inputs are the context. A fixed length gives them other parameters than the segment.
        self.routing = vr.VectorRouting(n_inp=n_context + n_segment, n_out=n_context, d_inp=d, d_out=d)
        self.decide = vr.VectorRouting(n_inp=n_context, n_out=N_SYMBOLS, d_inp=d, d_out=1, normalize=False)
        self.n_context, self.n_segment = n_context, n_segment

    def segments(self, symbols: Tensor) -> Tensor:
        """Embed symbols: [b, n] -> [b, n_segments, n_segment, d]. After the mark they are embedded apart."""
        marked = nn.functional.pad(symbols[:, :-1] == MARK, (1, 0))  # [b, n]
        x = self.embed(symbols + marked * (N_SYMBOLS + 1))  # [b, n, d]
        return x.unflatten(1, (-1, self.n_segment))

    def read(self, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Return the context after the last segment [b, c, d], and each symbol's credit for it [b, n, c]."""
        context = self.start.expand(len(segments), -1, -1)  # [b, c, d]
        credit = segments.new_zeros(len(segments), 0, self.n_context)  # [b, 0, c]
        for segment in segments.unbind(1):
            context, phi = self.routing.route(torch.cat((context, segment), 1))  # [b, c, d], [b, c + i, c]
            # Earlier symbols have credit for the new context through the old context.
            credit = torch.cat(
                (credit @ phi[:, : self.n_context], phi[:, self.n_context :]), 1
            )  # [b, n so far, c]
        return context, credit

    def forward(self, symbols: Tensor) -> Tensor:
        context, _ = self.read(self.segments(symbols))
        return self.decide(context)[..., 0]  # [b, 4]


def sequences(n: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return symbols [n, length] with one mark each, the position after the mark [n], and its symbol [n]."""
    symbols = torch.randint(N_SYMBOLS, (n, length))
    after = torch.randint(1, length, (n,))
    symbols.scatter_(1, after[:, None] - 1, MARK)
    return symbols, after, symbols.gather(1, after[:, None])[:, 0]


def main(n_steps: int = 300, n_segment: int = 8) -> dict[str, float]:
    """Train on sequences of up to 8 segments, then test on 6 and on 12 segments."""
    torch.manual_seed(0)
    reader = Reader(n_context=4, n_segment=n_segment, d=16)
    optimizer = torch.optim.Adam(reader.parameters(), lr=0.01)
    for step in range(n_steps):
        symbols, _, answer = sequences(64, 2 ** (step % 4) * n_segment)
        loss = nn.functional.cross_entropy(reader(symbols), answer)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
    results = {}
    with torch.no_grad():
        for n_segments in (6, 12):
            symbols, after, answer = sequences(500, n_segments * n_segment)
            right = (reader(symbols).argmax(-1) == answer).float().mean().item()
            _, credit = reader.read(reader.segments(symbols))
            looked = (credit.abs().sum(-1).argmax(-1) == after).float().mean().item()
            length = symbols.shape[1]
            print(f"{length} symbols: accuracy {right:.1%}; most credit at the right symbol in {looked:.1%}")
            results |= {f"right {n_segments}": right, f"looked {n_segments}": looked}
    return results


if __name__ == "__main__":
    main()
