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
/// A node reports its load every second; one that is silent for this long is asked again, and lost when it is
/// silent once more.
const SILENCE: Duration = Duration::from_secs(3);

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
    let info = within(transport.patience(), transport.info(at)).await?;
    if info.protocol != PROTOCOL {
        let found = info.protocol;
        return Err(TransportError::Protocol(format!("protocol {found}, this gateway speaks {PROTOCOL}")));
    }
    let epoch = info.epoch;
    if actor.cast(WorkerMsg::Connected(info)).is_err() {
        return Ok(());
    }
    let mut stream = within(SILENCE, transport.events(at)).await?;
    let mut seq = None;
    loop {
        let message = within(SILENCE, async { stream.next().await.transpose() }).await?;
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

/// A snapshot sets the seq; changes follow it without a gap, a load stands at it, all in the same epoch.
fn in_order(message: &Numbered, epoch: u64, seq: &mut Option<u64>) -> Result<(), TransportError> {
    let wrong = |what: String| Err(TransportError::Protocol(what));
    if message.epoch != epoch && planted!(LateEventApplied) {
        return Ok(());
    }
    if message.epoch != epoch {
        return wrong(format!("event of epoch {}, expected {epoch}", message.epoch));
    }
    let expected = match (&message.event, *seq) {
        (NodeEvent::Snapshot(_), _) => message.seq,
        (_, None) => return wrong("the stream does not begin with a snapshot".into()),
        (NodeEvent::Changes(_), Some(last)) => last + 1,
        (NodeEvent::Load(_), Some(last)) => last,
    };
    if message.seq != expected && !planted!(GapIgnored) {
        return wrong(format!("event {} where {expected} was due", message.seq));
    }
    *seq = Some(message.seq);
    Ok(())
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, TransportError>>,
) -> Result<T, TransportError> {
    let silent = |_| TransportError::Connect(format!("silent for {} s", limit.as_secs()));
    tokio::time::timeout(limit, call).await.map_err(silent)?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::ledger::LoadReport;
    use crate::wire::events::Snapshot;

    #[test]
    fn gaps_repeats_and_other_epochs_end_the_stream() {
        let at = |epoch, seq, event| Numbered { epoch, seq, event };
        let (snapshot, load) =
            (NodeEvent::Snapshot(Snapshot::default()), NodeEvent::Load(LoadReport::default()));
        let changes = NodeEvent::Changes(Vec::new());
        let mut seq = None;
        assert!(in_order(&at(1, 5, changes.clone()), 1, &mut seq).is_err());
        assert!(in_order(&at(1, 5, snapshot.clone()), 1, &mut seq).is_ok());
        assert!(in_order(&at(1, 5, load.clone()), 1, &mut seq).is_ok());
        assert!(in_order(&at(1, 6, changes.clone()), 1, &mut seq).is_ok());
        for (epoch, wrong) in [(1, 6), (1, 8), (2, 7)] {
            assert!(in_order(&at(epoch, wrong, changes.clone()), 1, &mut seq).is_err());
        }
        assert!(in_order(&at(1, 7, load), 1, &mut seq).is_err());
        assert!(in_order(&at(1, 7, changes), 1, &mut seq).is_ok());
        assert!(in_order(&at(1, 90, snapshot), 1, &mut seq).is_ok());
    }
}
