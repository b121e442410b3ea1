"""What the loop does, one module a station: pure functions and a short main() run as `python -m tasks.X`."""

import os

# OpenMP's threads wait by spinning: where other programs wanted the same cores, a training took 188 s on two
# threads and 7 s on one. This must be said before torch loads OpenMP; a setting of the user's wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
