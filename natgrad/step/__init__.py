"""Steps: how far and along which curve the parameters move."""

from natgrad.step.base import Fixed as Fixed
from natgrad.step.base import KLClip as KLClip
from natgrad.step.base import PlainRule as PlainRule
from natgrad.step.base import ResidualSpace as ResidualSpace
from natgrad.step.base import Step as Step
from natgrad.step.base import StepContext as StepContext
from natgrad.step.base import StepRule as StepRule
from natgrad.step.constraints import BackProjection as BackProjection
from natgrad.step.constraints import Clipping as Clipping
from natgrad.step.constraints import Constrained as Constrained
from natgrad.step.constraints import Constraint as Constraint
from natgrad.step.constraints import Penalty as Penalty
from natgrad.step.geodesic import christoffel as christoffel
from natgrad.step.geodesic import exponential as exponential
from natgrad.step.line_search import Armijo as Armijo
from natgrad.step.line_search import GeodesicSearch as GeodesicSearch
from natgrad.step.line_search import GridSearch as GridSearch
from natgrad.step.normalised import Normalised as Normalised
from natgrad.step.polar import Polar as Polar
from natgrad.step.queries import BatchQueries as BatchQueries
from natgrad.step.rules import Backtracking as Backtracking
from natgrad.step.rules import GeodesicCorrected as GeodesicCorrected
from natgrad.step.rules import LevenbergMarquardt as LevenbergMarquardt
from natgrad.step.rules import TrustRegion as TrustRegion
from natgrad.step.self_tuned import SelfTuned as SelfTuned
from natgrad.step.spring import Spring as Spring
