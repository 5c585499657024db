//! The Admit RPC beside the mailbox: known prefix plus appended hashes, the whole chain when the node asks.

use std::sync::Arc;
use std::time::Duration;

use super::reply::Reply;
use super::slot::WorkerSlot;
use super::transport::{Transport, TransportError};
use super::worker::WorkerMsg;
use crate::core::turn::Answer;
use crate::core::types::{BlockHash, SessionId, Tokens};
use crate::wire::admit::{AdmitAnswer, AdmitHead, Lease};

/// A request for admission, as a session actor sends it.
#[derive(Debug, Clone)]
pub struct AdmitAsk {
    /// Idempotency key of the attempt.
    pub request_id: String,
    /// `s(r)`.
    pub session: SessionId,
    /// `t(r)`.
    pub turn: u32,
    /// `prefix_hashes(r)`.
    pub chain: Arc<[BlockHash]>,
    /// `input_len(r)`.
    pub input_len: Tokens,
    /// The router's `append_len(r)`.
    pub append_len: Tokens,
    /// Output tokens to reserve.
    pub output_reserve: Tokens,
}

/// The answer, with the lease when there is one.
#[derive(Debug, Clone)]
pub struct Admission {
    /// For the turn machine.
    pub answer: Answer,
    /// D's reservation.
    pub lease: Option<Lease>,
}

impl From<Answer> for Admission {
    fn from(answer: Answer) -> Self {
        Self { answer, lease: None }
    }
}

/// Asks the node and answers within the timeout. `known`: blocks the node is believed to hold for the session.
pub(super) async fn admit(
    slot: Arc<WorkerSlot>,
    transport: Arc<dyn Transport>,
    ask: AdmitAsk,
    known: usize,
    timeout: Duration,
    reply: Reply<Admission>,
) {
    let call = async {
        match call(&slot, &*transport, &ask, known).await {
            Ok(AdmitAnswer::Resend) => call(&slot, &*transport, &ask, 0).await,
            other => other,
        }
    };
    let admission = match tokio::time::timeout(timeout, call).await {
        Err(_elapsed) => Answer::Silent.into(),
        Ok(Ok(answer)) => admission(answer),
        Ok(Err(error)) => {
            match error {
                TransportError::Connect(error) => slot.cast(WorkerMsg::Unreached(error)),
                // It lives, so nothing else tells that it refuses what it is asked.
                error => tracing::warn!(worker = %slot.at.name, %error, "a worker did not answer an Admit"),
            }
            Answer::Unreachable.into()
        }
    };
    reply.send(admission);
}

async fn call(
    slot: &WorkerSlot,
    transport: &dyn Transport,
    ask: &AdmitAsk,
    known: usize,
) -> Result<AdmitAnswer, TransportError> {
    let head = AdmitHead {
        request_id: ask.request_id.clone(),
        session: ask.session.clone(),
        turn: ask.turn,
        input_len: ask.input_len,
        append_len: ask.append_len,
        output_reserve: ask.output_reserve,
        known: known as u32,
        known_hash: known.checked_sub(1).and_then(|last| ask.chain.get(last)).copied(),
    };
    transport.admit(&slot.at, head, &ask.chain[known..]).await
}

fn admission(answer: AdmitAnswer) -> Admission {
    match answer {
        AdmitAnswer::Admitted { lease, mode, reuse_blocks, terms } => Admission {
            answer: Answer::Admitted { mode, reuse_blocks, terms: Some(terms) },
            lease: Some(lease),
        },
        AdmitAnswer::Rejected { reason, terms } => Answer::Rejected { reason, terms: Some(terms) }.into(),
        // A node that asks twice, or knows the id as finished, cannot serve this attempt.
        AdmitAnswer::Resend | AdmitAnswer::Stale => Answer::Unreachable.into(),
    }
}
