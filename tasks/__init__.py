"""What the loop does, one module a station: pure functions and a short main() run as `python -m tasks.X`."""

import os

# OpenMP's threads wait by spinning: where another program wanted the same core, that slowed a training on two
# threads from 7 s to 188 s. This must be said before torch loads its OpenMP; a setting of the user's wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")
