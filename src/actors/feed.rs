//! The feed of one worker: connects, checks the protocol, hands over a snapshot and then every event in order.
//! A gap, a late event of another epoch or a broken connection ends the stream; the next one starts with a
//! snapshot. At most one message of a feed is ever in the actor's mailbox.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use ractor::ActorRef;

use super::api::WorkerRef;
use super::reply::Reply;
use super::transport::{Transport, TransportError};
use super::worker::WorkerMsg;
use crate::wire::PROTOCOL;
use crate::wire::events::{NodeEvent, Numbered};

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);
/// A node reports its load every second; one that is silent for this long is not there.
const SILENCE: Duration = Duration::from_secs(5);

/// Runs until the actor is gone.
pub(super) async fn run(actor: ActorRef<WorkerMsg>, at: WorkerRef, transport: Arc<dyn Transport>) {
    let mut retry = FIRST_RETRY;
    loop {
        let mut followed = false;
        let Err(error) = follow(&actor, &at, &*transport, &mut followed).await else { return };
        if followed {
            // A stream that broke says little about the node: ask it at once before calling it lost.
            retry = FIRST_RETRY;
            continue;
        }
        if actor.cast(WorkerMsg::Lost(error.to_string())).is_err() {
            return;
        }
        tokio::time::sleep(retry).await;
        retry = (retry * 2).min(LAST_RETRY);
    }
}

/// One connection. `Ok`: the actor is gone.
async fn follow(
    actor: &ActorRef<WorkerMsg>,
    at: &WorkerRef,
    transport: &dyn Transport,
    followed: &mut bool,
) -> Result<(), TransportError> {
    let info = within(transport.info(at)).await?;
    if info.protocol != PROTOCOL {
        let found = info.protocol;
        return Err(TransportError::Protocol(format!("protocol {found}, this gateway speaks {PROTOCOL}")));
    }
    let epoch = info.epoch;
    if actor.cast(WorkerMsg::Connected(info)).is_err() {
        return Ok(());
    }
    let mut stream = within(transport.events(at)).await?;
    let mut seq = None;
    loop {
        let message = within(async { stream.next().await.transpose() }).await?;
        let Some(message) = message else {
            return Err(TransportError::Connect("the event stream ended".into()));
        };
        in_order(&message, epoch, &mut seq)?;
        *followed = true;
        let (credit, taken) = Reply::channel();
        if actor.cast(WorkerMsg::Fed(message, credit)).is_err() || taken.await.is_none() {
            return Ok(());
        }
    }
}

/// A snapshot sets the seq; everything else must follow it without a gap, in the same epoch.
fn in_order(message: &Numbered, epoch: u64, seq: &mut Option<u64>) -> Result<(), TransportError> {
    let wrong = |what: String| Err(TransportError::Protocol(what));
    if message.epoch != epoch {
        return wrong(format!("event of epoch {}, expected {epoch}", message.epoch));
    }
    match (&message.event, *seq) {
        (NodeEvent::Snapshot(_), _) => {}
        (_, None) => return wrong("the stream does not begin with a snapshot".into()),
        (_, Some(last)) if message.seq != last + 1 => {
            return wrong(format!("event {} after {last}", message.seq));
        }
        _ => {}
    }
    *seq = Some(message.seq);
    Ok(())
}

async fn within<T>(call: impl Future<Output = Result<T, TransportError>>) -> Result<T, TransportError> {
    let silent = |_| TransportError::Connect(format!("silent for {} s", SILENCE.as_secs()));
    tokio::time::timeout(SILENCE, call).await.map_err(silent)?
}
