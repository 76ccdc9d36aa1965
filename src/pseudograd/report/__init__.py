"""Pages, figures and summaries of searches."""
