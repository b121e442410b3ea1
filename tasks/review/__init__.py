"""The review of a release: the ledger of decisions, and MLflow kept in step with it."""
