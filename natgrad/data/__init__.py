"""Small data sets that travel with the library, for the demo, the documentation and the tests."""

from natgrad.data.digits import Digits as Digits
from natgrad.data.digits import Examples as Examples
from natgrad.data.digits import load_digits as load_digits
