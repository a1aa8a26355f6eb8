"""The colour of every method, in all pictures: each can be seen on a light and on a dark page."""

GREY = "#858585"
COLOURS = {
    "ng.Natural": "#d1352b",
    "natural gradient": "#e8743b",
    "K-FAC": "#b0409a",
    "Gauss–Newton": "#7b62c9",
    "Sobolev": "#a9820f",
    "AdamW": "#3b82c4",
    "Muon": "#1f9d8f",
    "L-BFGS": "#4f9a3f",
    "gradient descent": "#6b8299",
    "exact": GREY,
}
