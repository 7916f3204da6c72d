"""What plans cost, whoever found them: `judge`, and what it asks for."""
