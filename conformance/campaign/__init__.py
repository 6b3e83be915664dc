"""Campaigns: many implementations, dtypes and seeds judged as jobs that can be resumed, divided and
merged.
"""
