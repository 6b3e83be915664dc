"""What a property touches: a session with the implementation under test, and the assertions on what it returns."""
