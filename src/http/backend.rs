//! What the gateway asks of the rooms below it. One seam, so that the gateway is tested with scripted
//! placements and an embedder can bring its own.

use std::future::Future;

use actix_web::http::header::HeaderMap;
use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use serde_json::Value;

use super::errors::ApiError;
use super::observe::Observed;
use crate::actors::api::{DispatchPlan, Failure, Refusal, TurnResult, WorkerRef};
use crate::keeper::handback::HandBack;
use crate::wire::plan::Report;

/// A request to place.
#[derive(Debug, Clone, Copy)]
pub struct Incoming<'a> {
    /// Path of the API, e.g. `/v1/chat/completions`.
    pub path: &'static str,
    /// The client's headers.
    pub headers: &'a HeaderMap,
    /// The client's body, whole.
    pub body: &'a Bytes,
    /// Whether the decision is to be recorded.
    pub explain: bool,
}

/// Sessions and actors, as the gateway sees them. Cheap to clone: each serving thread has one.
pub trait Backend: Clone + Send + 'static {
    /// A placed turn.
    type Turn: Turn;

    /// Finds out whose turn this is and places it. Dropping the future withdraws the request.
    ///
    /// # Errors
    /// What the client is told: 400 for a body that cannot be routed, 404 for an unknown model, or a refusal.
    fn place(&self, incoming: Incoming<'_>) -> impl Future<Output = Result<Self::Turn, ApiError>>;

    /// A D for a request that is nobody's turn: the least busy one, or the `nth` after it.
    fn anyone(&self, nth: usize) -> Option<WorkerRef>;

    /// Whether requests can be served: at least one D is up and the gateway is not draining.
    fn ready(&self) -> bool;

    /// Names of the models the workers serve.
    fn models(&self) -> Vec<String>;

    /// Observable state of the sessions, for `/admin/sessions`.
    fn sessions(&self) -> impl Future<Output = Value>;

    /// Observable state of the workers, for `/admin/workers`.
    fn workers(&self) -> impl Future<Output = Value>;

    /// A recorded decision as the list `explain` reads, for `/admin/explain/NAME`.
    fn record(&self, name: &str) -> Option<Value> {
        let _ = name;
        None
    }
}

/// A placed turn. Dropped without [`Turn::finished`] it counts as cancelled: lease and inflight are returned.
pub trait Turn: Sized + Unpin + 'static {
    /// How to execute it.
    fn plan(&self) -> &DispatchPlan;

    /// Name of the decision's record, if one was made.
    fn record(&self) -> Option<&str> {
        None
    }

    /// The P has done its part, while D goes on.
    fn prefill_done(&self) {}

    /// Its D says what it did; before the first byte is passed on.
    fn reported(&self, report: Report) {
        let _ = report;
    }

    /// Its answer is complete as far as the client can tell, and its last bytes are about to be passed on.
    fn complete(&self, observed: &Observed) {
        let _ = observed;
    }

    /// What its D may hand back to a P, once it is complete.
    fn hand_backs(&self) -> Vec<HandBack> {
        Vec::new()
    }

    /// Waits until one of its workers stops to answer: connections to a frozen worker don't break.
    fn lost(&self) -> LocalBoxFuture<'static, Failure> {
        Box::pin(std::future::pending())
    }

    /// Places it anew after a failure; nothing has reached the client yet.
    ///
    /// # Errors
    /// Nobody else can take it.
    fn failed(self, failure: Failure) -> impl Future<Output = Result<Self, Refusal>>;

    /// It was served to its end.
    fn finished(self, observed: Observed);

    /// It broke off in the middle of its answer. The default treats it as cancelled.
    fn broken(self) {
        drop(self);
    }
}

impl From<&Observed> for TurnResult {
    fn from(seen: &Observed) -> Self {
        Self {
            prompt_tokens: seen.prompt_tokens,
            completion_tokens: seen.completion_tokens,
            cached_tokens: seen.cached_tokens,
            stop: seen.stop,
        }
    }
}
