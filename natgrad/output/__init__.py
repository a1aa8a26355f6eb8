"""Metrics on a model's outputs."""

from natgrad.output.batch_gradient import BatchGradient as BatchGradient
from natgrad.output.fubini_study import FubiniStudy as FubiniStudy
from natgrad.output.heads import Heads as Heads
from natgrad.output.hessian import Bregman as Bregman
from natgrad.output.hessian import Divergence as Divergence
from natgrad.output.hessian import Empirical as Empirical
from natgrad.output.hessian import GradientCovariance as GradientCovariance
from natgrad.output.hessian import LossHessian as LossHessian
from natgrad.output.losses import metric_of as metric_of
from natgrad.output.metric import Euclidean as Euclidean
from natgrad.output.metric import Fisher as Fisher
from natgrad.output.metric import OutputMetric as OutputMetric
from natgrad.output.metric import Sampled as Sampled
from natgrad.output.metric import Sum as Sum
from natgrad.output.sobolev import Sobolev as Sobolev
