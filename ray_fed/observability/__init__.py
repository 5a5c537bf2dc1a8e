"""Events, reports and pictures of what happened. No code of ray_fed acts on them."""
