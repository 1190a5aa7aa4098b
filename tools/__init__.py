"""Programs for those who work on tutti: the generator of the reference pages, and the hooks of the
documentation's site. Nothing of the program imports them, and no package has them."""
