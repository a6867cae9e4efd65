"""Tells a report: as text for people, as JSON for programs. How the findings came about is no matter here."""
