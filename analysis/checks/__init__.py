"""The invariants that judge every run, one class a check, in files by subject."""

from __future__ import annotations

from analysis.checks.addresses import OneEngineAnAddress
from analysis.checks.affinity import AbortedIsNotCompleted, NoTurnIntoAnAbort, OneBackendASession, RouterEmptyAtTheEnd
from analysis.checks.autoscaler import (
    AutoscalerCooldown,
    AutoscalerKeepsBounds,
    AutoscalerOneRequest,
    AutoscalerShowsItsOwn,
    AutoscalerSustained,
    NoBlindScaleIn,
)
from analysis.checks.barriers import HealthHoldsInABarrier, LeasesAddUp, OneBarrier, VersionsNeverGoBack
from analysis.checks.base import Check, CheckResult
from analysis.checks.claims import GatewayCounts
from analysis.checks.engine_surprises import (
    AbortEndsTheOneAsked,
    NothingServedFromAnOldCache,
    NothingToALeavingEngine,
)
from analysis.checks.engines import (
    AdminOnce,
    LoadedExportIsWhole,
    NoRouteBeforeHealth,
    NoStalePrefix,
    OneVersionOneHash,
    ServedVersion,
)
from analysis.checks.gate_cycles import OldEpochsDoNothing
from analysis.checks.judging import SeedFromContent
from analysis.checks.ledger import Ledger
from analysis.checks.processes import EveryWaitEnds, NoCrash, NoUseAfterDeath
from analysis.checks.proxy import ProxyFollowsTheFleet, ProxyPostDeliveredOnce, ProxyProbe, ProxyRegisteredOnce
from analysis.checks.publication_order import PublicationOrder
from analysis.checks.published import PublishedIsServed
from analysis.checks.publishing import (
    NoUpdateUnderLease,
    OneDeadline,
    PoisonedGateAdmitsNothing,
    TurnOfOneVersion,
)
from analysis.checks.references import NoReferenceLeft, ReferenceFreedOnce
from analysis.checks.requests import AnswerIsTheEngines, Converges, NothingLost, NothingTwice, UnexplainedFailures
from analysis.checks.rollout_scaling import NoEndInAnUpdate, RolloutStatusIsExplicit
from analysis.checks.run import FaultsHit, NoAnomalies, NoLeaks, RunFinished
from analysis.checks.scaling import (
    CleanMeansClean,
    GroupsReleasedOnce,
    NeverAboveTarget,
    ProtectedAlive,
    RanksAreNotReused,
    RemovedWhileIdle,
    VictimStaysOut,
)
from analysis.checks.scaling_memory import MemoryIsBounded
from analysis.checks.scaling_operators import (
    OneOperationAtATime,
    OnlyIntegersAdmitted,
    OperationsEnd,
    SameKeySameOperation,
)
from analysis.checks.session_server import (
    FailuresAreTold,
    OnlyGenerationsAreTouched,
    PromptsContinueTheRecord,
    SessionsAreReleased,
    SessionTurnsAreTraced,
)
from analysis.checks.traces import (
    BufferAnswers,
    StoreHoldsTheBuffer,
    StoreIsFoundAgain,
    TraceIsTheTranscript,
    TraceSurvives,
)
from analysis.checks.weight_update import (
    EveryRankLeaves,
    LabelFollowsWeights,
    MemoryOrder,
    NothingRunsOnPartWeights,
    ServesTheTrainersWeights,
    UpdatesMeetTheLiving,
)

INVARIANTS: tuple[type[Check], ...] = (
    RunFinished,
    NothingLost,
    NothingTwice,
    AnswerIsTheEngines,
    UnexplainedFailures,
    Converges,
    EveryWaitEnds,
    NoUseAfterDeath,
    NoCrash,
    NoRouteBeforeHealth,
    ServedVersion,
    OneVersionOneHash,
    NoStalePrefix,
    LoadedExportIsWhole,
    AdminOnce,
    FaultsHit,
    NoAnomalies,
    NoLeaks,
    ProtectedAlive,
    RemovedWhileIdle,
    VictimStaysOut,
    GroupsReleasedOnce,
    RanksAreNotReused,
    NeverAboveTarget,
    OnlyIntegersAdmitted,
    CleanMeansClean,
    OneOperationAtATime,
    SameKeySameOperation,
    OperationsEnd,
    TurnOfOneVersion,
    NoUpdateUnderLease,
    PoisonedGateAdmitsNothing,
    PublicationOrder,
    PublishedIsServed,
    OneDeadline,
    OneBackendASession,
    RouterEmptyAtTheEnd,
    AbortedIsNotCompleted,
    NoTurnIntoAnAbort,
    ServesTheTrainersWeights,
    LabelFollowsWeights,
    NothingRunsOnPartWeights,
    EveryRankLeaves,
    UpdatesMeetTheLiving,
    MemoryOrder,
    ProxyRegisteredOnce,
    ProxyPostDeliveredOnce,
    ProxyFollowsTheFleet,
    ProxyProbe,
    AutoscalerKeepsBounds,
    AutoscalerCooldown,
    AutoscalerOneRequest,
    NoBlindScaleIn,
    AutoscalerSustained,
    SeedFromContent,
    MemoryIsBounded,
    RolloutStatusIsExplicit,
    NoEndInAnUpdate,
    OneEngineAnAddress,
    AutoscalerShowsItsOwn,
    TraceSurvives,
    TraceIsTheTranscript,
    StoreHoldsTheBuffer,
    StoreIsFoundAgain,
    BufferAnswers,
    ReferenceFreedOnce,
    NoReferenceLeft,
    NothingServedFromAnOldCache,
    AbortEndsTheOneAsked,
    NothingToALeavingEngine,
    SessionTurnsAreTraced,
    FailuresAreTold,
    PromptsContinueTheRecord,
    OnlyGenerationsAreTouched,
    SessionsAreReleased,
    GatewayCounts,
    HealthHoldsInABarrier,
    OneBarrier,
    LeasesAddUp,
    VersionsNeverGoBack,
    OldEpochsDoNothing,
)

__all__ = ["INVARIANTS", "Check", "CheckResult", "Ledger"]
