//! How actors reach worker nodes: one trait, so that tests and the fault lab can put a simulated network here.

use std::pin::Pin;
use std::time::Duration;

use futures_core::Stream;
use futures_core::future::BoxFuture;

use super::api::WorkerRef;
use crate::core::types::BlockHash;
use crate::wire::admit::{AdmitAnswer, AdmitHead, LeaseCall};
use crate::wire::events::Numbered;
use crate::wire::info::NodeInfo;

/// Why a call to a node brought no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// No connection, or it broke.
    #[error("no connection: {0}")]
    Connect(String),
    /// The node answered something that is not of the protocol.
    #[error("not of the protocol: {0}")]
    Protocol(String),
    /// It answers, and is not what it must be; says why.
    #[error("{0}")]
    Unfit(String),
}

/// A stream of a node's events.
pub type EventStream = Pin<Box<dyn Stream<Item = Result<Numbered, TransportError>> + Send>>;

/// Calls to one node. Timeouts are the caller's.
pub trait Transport: Send + Sync + 'static {
    /// Longest time for [`Self::info`] until the worker counts as lost.
    fn patience(&self) -> Duration {
        Duration::from_secs(3)
    }

    /// `GET /kvc/info`.
    fn info<'a>(&'a self, worker: &'a WorkerRef) -> BoxFuture<'a, Result<NodeInfo, TransportError>>;

    /// `POST /admit_direct_append`.
    fn admit<'a>(
        &'a self,
        worker: &'a WorkerRef,
        head: AdmitHead,
        appended: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<AdmitAnswer, TransportError>>;

    /// `POST /kvc/leases/release`.
    fn release<'a>(
        &'a self,
        worker: &'a WorkerRef,
        call: LeaseCall,
    ) -> BoxFuture<'a, Result<(), TransportError>>;

    /// `GET /kvc/events`, from the start (a snapshot comes first).
    fn events<'a>(&'a self, worker: &'a WorkerRef) -> BoxFuture<'a, Result<EventStream, TransportError>>;

    /// The worker has left for good.
    fn forget(&self, worker: &WorkerRef) {
        let _ = worker;
    }

    /// What is known of the worker's engine here, for `/admin/workers`.
    fn observe(&self, worker: &WorkerRef) -> Option<serde_json::Value> {
        let _ = worker;
        None
    }
}
