"""The same language model under two pipelines: the glue of each, and what is asked of both."""
