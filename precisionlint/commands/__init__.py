"""The commands, a module each: ``add`` declares the options, and what it sets as ``run`` makes an ``Outcome`` of them."""
