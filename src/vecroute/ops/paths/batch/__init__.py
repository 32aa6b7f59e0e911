"""The batch path: many samples of a moderate size, padded, masked or packed, in few launches.

``sizes`` says what is how large, ``steps`` prepares the launches, ``run`` makes them,
``kernels`` and ``products``
are Triton's.
"""
