"""A look inside weights: what they attend to, what they have learned of places and patches, and where they are wrong."""
