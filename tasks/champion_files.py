"""What lies in a workspace's `champion/`. Named here, so that who only looks for it imports nothing heavy."""

FOLDER = "champion"
RECORD = "champion.json"
PARAMS = "params.yaml"
"""It was built with these; absent of a champion that was approved before they were kept."""
PREDICTIONS = "predictions.parquet"
"""As the stage parity writes them, below models/parity and beside the record."""
