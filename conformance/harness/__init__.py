"""What a property works with: a session with the implementation under test, and assertions on what
it returns.
"""
