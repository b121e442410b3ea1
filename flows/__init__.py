"""When things run: Prefect flows and the command line."""
