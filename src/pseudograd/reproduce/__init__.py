"""The paper as code: its toy example, and what its analysis predicts."""
