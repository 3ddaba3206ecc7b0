"""What people are shown: parts of HTML reports (pages from templates, tables, charts), and boxes drawn into images."""
