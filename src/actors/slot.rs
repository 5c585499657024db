//! What outlives a worker actor's restarts: its address, the way to its current incarnation, and the counts of
//! Σ (`inflight[d]`, `assigned[d]`). Guards count down on drop, so each count falls exactly once whatever ends
//! a turn (D3).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use arc_swap::ArcSwapOption;
use ractor::ActorRef;
use tokio::sync::{Notify, watch};

use super::api::WorkerRef;
use super::worker::WorkerMsg;
use crate::core::types::{Tokens, WorkerId};

/// What a worker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// P.
    Prefill,
    /// D.
    Decode,
}

/// One worker of the fleet.
#[derive(Debug)]
pub struct WorkerSlot {
    /// Where it is.
    pub at: WorkerRef,
    /// P or D.
    pub role: Role,
    actor: ArcSwapOption<ActorRef<WorkerMsg>>,
    kv_addr: ArcSwapOption<String>,
    d2p_addr: ArcSwapOption<String>,
    model: ArcSwapOption<String>,
    inflight: AtomicU32,
    assigned: AtomicU64,
    pinned: AtomicU64,
    backlog: AtomicU64,
    /// Whether it is connected, its mirror in step.
    up: AtomicBool,
    /// Whether it was told to take no new turns.
    draining: AtomicBool,
    /// What runs there may end; then it leaves the fleet.
    leaving: AtomicBool,
    /// Told whenever nothing runs there any more.
    idle: Notify,
    /// Whether its node answers; what runs there is given up when it stops to.
    reachable: watch::Sender<bool>,
}

impl WorkerSlot {
    /// A worker nobody has talked to yet.
    pub fn new(at: WorkerRef, role: Role) -> Arc<Self> {
        Arc::new(Self {
            at,
            role,
            actor: ArcSwapOption::empty(),
            kv_addr: ArcSwapOption::empty(),
            d2p_addr: ArcSwapOption::empty(),
            model: ArcSwapOption::empty(),
            inflight: AtomicU32::new(0),
            assigned: AtomicU64::new(0),
            pinned: AtomicU64::new(0),
            backlog: AtomicU64::new(0),
            up: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            idle: Notify::new(),
            reachable: watch::Sender::new(true),
        })
    }

    /// Sends to the current incarnation. A message to a dead actor is dropped, which answers its reply.
    pub fn cast(&self, message: WorkerMsg) {
        if let Some(actor) = &*self.actor.load() {
            let _ = actor.cast(message);
        }
    }

    pub(super) fn install(&self, actor: ActorRef<WorkerMsg>) {
        self.actor.store(Some(Arc::new(actor)));
    }

    /// Where it is, with the KV listener it reported last.
    pub(super) fn reachable_at(&self) -> WorkerRef {
        let kv_addr = self.kv_addr.load().as_ref().map(|addr| addr.as_str().into());
        WorkerRef { kv_addr, ..self.at.clone() }
    }

    /// Takes the KV listener a node reports. One that listens on every address is reached at its URL's host.
    pub(super) fn report_kv_addr(&self, addr: Option<&str>) {
        self.kv_addr.store(self.seen_from_here(addr).map(Arc::new));
    }

    /// As [`Self::report_kv_addr`], for the listener of D→P pushes.
    pub(super) fn report_d2p_addr(&self, addr: Option<&str>) {
        self.d2p_addr.store(self.seen_from_here(addr).map(Arc::new));
    }

    /// Where D→P pushes arrive, if it takes any.
    pub fn d2p_addr(&self) -> Option<String> {
        self.d2p_addr.load().as_ref().map(|addr| addr.to_string())
    }

    fn seen_from_here(&self, addr: Option<&str>) -> Option<String> {
        let port = addr.and_then(|a| a.strip_prefix("0.0.0.0:").or_else(|| a.strip_prefix("[::]:")));
        let host = || self.at.url.split("://").nth(1).and_then(|rest| rest.rsplit_once(':')).map(|(h, _)| h);
        match (port, host()) {
            (Some(port), Some(host)) => Some(format!("{host}:{port}")),
            _ => addr.map(str::to_owned),
        }
    }

    /// The model it serves, once it has said so.
    pub fn model(&self) -> Option<Arc<String>> {
        self.model.load_full()
    }

    pub(super) fn report_model(&self, model: &str) {
        self.model.store(Some(Arc::new(model.to_owned())));
    }

    pub(super) fn set_up(&self, up: bool) {
        self.up.store(up, Relaxed);
    }

    pub(super) fn set_reachable(&self, reachable: bool) {
        self.reachable.send_if_modified(|was| std::mem::replace(was, reachable) != reachable);
    }

    /// Waits until the node stops to answer; at once when it does not answer now.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut reachable = self.reachable.subscribe();
        async move {
            if reachable.wait_for(|reachable| !reachable).await.is_err() {
                // The fleet itself is gone; whoever waits is ended by that.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Whether turns may be sent there.
    pub fn is_up(&self) -> bool {
        self.up.load(Relaxed) && !self.is_draining()
    }

    /// Takes no new turns, or takes them again. Outlives its actor's restarts.
    pub(super) fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Relaxed);
    }

    /// Whether it was told to take no new turns.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed) || self.is_leaving()
    }

    /// It takes no turn ever again. `false`: it was told so before.
    pub(super) fn leave(&self) -> bool {
        !self.leaving.swap(true, Relaxed)
    }

    /// Whether it leaves the fleet when what runs there has ended.
    pub fn is_leaving(&self) -> bool {
        self.leaving.load(Relaxed)
    }

    /// Waits until no turn runs there.
    pub(super) async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.inflight() == 0 {
                return;
            }
            idle.await;
        }
    }

    fn ended(&self) {
        if self.inflight.fetch_sub(1, Relaxed) == 1 {
            self.idle.notify_waiters();
        }
    }

    /// The actor of its current incarnation.
    pub(super) fn actor(&self) -> Option<ActorRef<WorkerMsg>> {
        self.actor.load().as_deref().cloned()
    }

    /// `inflight`.
    pub fn inflight(&self) -> u32 {
        self.inflight.load(Relaxed)
    }

    /// `assigned`.
    pub fn assigned(&self) -> u64 {
        self.assigned.load(Relaxed)
    }

    /// Prompt tokens of the live sessions pinned here.
    pub fn pinned_tokens(&self) -> Tokens {
        self.pinned.load(Relaxed)
    }

    /// P: prompt tokens dispatched and not done.
    pub fn backlog(&self) -> Tokens {
        self.backlog.load(Relaxed)
    }

    /// Line 10 and D4: counts a turn dispatched to this D.
    pub(super) fn dispatched(self: &Arc<Self>) -> CountGuard {
        self.inflight.fetch_add(1, Relaxed);
        self.assigned.fetch_add(1, Relaxed);
        CountGuard { slot: self.clone(), kind: Kind::Inflight }
    }

    /// Counts a prompt dispatched to this P.
    pub(super) fn prefilling(self: &Arc<Self>, tokens: Tokens) -> CountGuard {
        self.inflight.fetch_add(1, Relaxed);
        self.assigned.fetch_add(1, Relaxed);
        self.backlog.fetch_add(tokens, Relaxed);
        CountGuard { slot: self.clone(), kind: Kind::Backlog(tokens) }
    }

    /// Counts a live session pinned here.
    pub(super) fn pinned(self: &Arc<Self>, tokens: Tokens) -> CountGuard {
        self.pinned.fetch_add(tokens, Relaxed);
        CountGuard { slot: self.clone(), kind: Kind::Pinned(tokens) }
    }
}

#[derive(Debug)]
enum Kind {
    Inflight,
    Backlog(Tokens),
    Pinned(Tokens),
}

/// Undoes its count when dropped.
#[derive(Debug)]
pub struct CountGuard {
    slot: Arc<WorkerSlot>,
    kind: Kind,
}

impl CountGuard {
    /// Tokens it counts as pinned at a worker.
    pub(super) fn pinned_at(&self, worker: WorkerId) -> Tokens {
        match self.kind {
            Kind::Pinned(tokens) if self.slot.at.id == worker => tokens,
            _ => 0,
        }
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        match self.kind {
            Kind::Inflight => self.slot.ended(),
            Kind::Backlog(tokens) => {
                self.slot.backlog.fetch_sub(tokens, Relaxed);
                self.slot.ended();
            }
            Kind::Pinned(tokens) => {
                self.slot.pinned.fetch_sub(tokens, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kv_listener_on_every_address_is_reached_at_the_urls_host() {
        let at = WorkerRef {
            id: WorkerId(0),
            role: Role::Decode,
            name: "d".into(),
            url: "http://10.0.0.7:81".into(),
            kv_addr: None,
        };
        let slot = WorkerSlot::new(at, Role::Decode);
        let reached = |addr: Option<&str>| {
            slot.report_kv_addr(addr);
            slot.reachable_at().kv_addr.map(|a| a.to_string())
        };
        assert_eq!(reached(Some("0.0.0.0:9001")).as_deref(), Some("10.0.0.7:9001"));
        assert_eq!(reached(Some("[::]:9001")).as_deref(), Some("10.0.0.7:9001"));
        assert_eq!(reached(Some("10.0.0.8:9001")).as_deref(), Some("10.0.0.8:9001"));
        assert_eq!(reached(None), None);
    }

    #[test]
    fn counts_fall_exactly_once() {
        let at = WorkerRef {
            id: WorkerId(0),
            role: Role::Prefill,
            name: "p".into(),
            url: "http://p:1".into(),
            kv_addr: None,
        };
        let slot = WorkerSlot::new(at, Role::Prefill);
        let (a, b, c) = (slot.dispatched(), slot.prefilling(70), slot.pinned(9));
        assert_eq!((slot.inflight(), slot.assigned(), slot.backlog(), slot.pinned_tokens()), (2, 2, 70, 9));
        drop((a, b, c));
        assert_eq!((slot.inflight(), slot.assigned(), slot.backlog(), slot.pinned_tokens()), (0, 2, 0, 0));
    }
}
