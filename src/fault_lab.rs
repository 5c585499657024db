//! The product's side of the fault lab (`tests/faults`): points where an actor may be slowed down or panic, the
//! clocks of nodes, and bugs that can be planted to see whether the lab finds them.
//!
//! Exists only with the feature `fault-lab`. Everything is per thread, as a lab runs on one.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::core::types::SessionId;

/// Where an actor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site<'a> {
    /// A session actor of the gateway `instance`.
    Session {
        /// The gateway.
        instance: u64,
        /// The session.
        session: &'a SessionId,
        /// Names the actor.
        actor: u64,
        /// Whether a turn begins with this message.
        begins: bool,
    },
    /// The actor of a worker.
    Worker(&'a str),
    /// The router actor of the gateway `instance`.
    Router(u64),
    /// An actor has handled its message.
    Done(&'static str),
}

/// What happens at a [`Site`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Nothing.
    Go,
    /// The handler panics.
    Panic,
    /// The handler takes that long.
    Pause(Duration),
}

/// Whoever runs a schedule.
pub trait Lab {
    /// Decides what happens at a site.
    fn at(&self, site: Site<'_>) -> Act;

    /// How far the clock of a node is ahead.
    fn skew(&self, node: &str) -> Duration;
}

/// A bug that can be planted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bug {
    /// An admission does not reset the rejects of its worker (line 8).
    ResetMissing,
    /// A reject is counted twice.
    RejectCountedTwice,
    /// A turn that failed moves its session's pin.
    PinMovedOnFailure,
    /// A lease that is not used is not given back.
    LeaseNotReleased,
    /// A turn that ended still counts at its worker.
    InflightKept,
    /// A client that leaves is not noticed once its turn was granted.
    CancelLost,
    /// A turn is completed twice.
    DoubleCommit,
    /// Whoever waits for room when the router actor dies is forgotten.
    WaiterLost,
    /// An event of an earlier epoch is applied.
    LateEventApplied,
    /// A gap in the events is not noticed.
    GapIgnored,
    /// A new snapshot does not replace the mirror.
    MirrorKept,
    /// The same request id is admitted twice.
    AdmitNotIdempotent,
    /// An expired lease still counts.
    ExpiredLeaseHonoured,
    /// The KV of a running turn may be evicted.
    RunningEvicted,
    /// KV frames are not checked.
    TransferUnchecked,
    /// A request whose answer is lost is sent again.
    SentTwice,
    /// An answer that broke off ends as if it were complete.
    CleanEndAfterDeath,
    /// A worker that said it is busy is asked again.
    BusyRetriedBlindly,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 18] = [
        Self::ResetMissing,
        Self::RejectCountedTwice,
        Self::PinMovedOnFailure,
        Self::LeaseNotReleased,
        Self::InflightKept,
        Self::CancelLost,
        Self::DoubleCommit,
        Self::WaiterLost,
        Self::LateEventApplied,
        Self::GapIgnored,
        Self::MirrorKept,
        Self::AdmitNotIdempotent,
        Self::ExpiredLeaseHonoured,
        Self::RunningEvicted,
        Self::TransferUnchecked,
        Self::SentTwice,
        Self::CleanEndAfterDeath,
        Self::BusyRetriedBlindly,
    ];
}

thread_local! {
    static LAB: RefCell<Option<Rc<dyn Lab>>> = const { RefCell::new(None) };
    static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
}

/// Installs a lab and a bug on this thread, or takes them out.
pub fn install(lab: Option<Rc<dyn Lab>>, bug: Option<Bug>) {
    LAB.with(|l| *l.borrow_mut() = lab);
    PLANTED.with(|p| p.set(bug));
}

/// Whether a bug is planted.
pub fn planted(bug: Bug) -> bool {
    PLANTED.with(|p| p.get() == Some(bug))
}

fn lab() -> Option<Rc<dyn Lab>> {
    LAB.with(|l| l.borrow().clone())
}

/// A site is reached.
pub fn at(site: Site<'_>) -> impl Future<Output = ()> + Send + use<> {
    let act = lab().map_or(Act::Go, |lab| lab.at(site));
    async move {
        match act {
            Act::Go => {}
            Act::Panic => panic!("fault lab: a handler panics"),
            Act::Pause(span) => tokio::time::sleep(span).await,
        }
    }
}

/// How far the clock of a node is ahead.
pub fn skew(node: &str) -> Duration {
    lab().map_or(Duration::ZERO, |lab| lab.skew(node))
}
