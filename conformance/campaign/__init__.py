"""Campaigns: many implementations, dtypes and seeds as jobs, to be resumed, divided and merged."""
