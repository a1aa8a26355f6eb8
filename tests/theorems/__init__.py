"""What the library promises, one theorem a test. The letter and number in a name are the promise.

M: metrics on outputs, pulled back. O: over-parametrised models. P: steps. E: exponential families. K: K-FAC.
S: Sobolev metrics and the geometry of function space. The details are tested beside each package.
"""
