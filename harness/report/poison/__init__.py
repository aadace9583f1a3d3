"""What memory an engine lets in, in every form."""
