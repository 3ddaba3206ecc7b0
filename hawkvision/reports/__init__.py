"""Shared parts of HTML reports: pages from templates, tables and charts."""
