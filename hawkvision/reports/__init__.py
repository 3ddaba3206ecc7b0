"""What HTML reports share: pages from templates, and the marks that charts are drawn with."""
