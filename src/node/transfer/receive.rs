//! The receiving side: a listener, and one task per connection that hands transfers to their turns.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::net::{Hangup, Io};

use super::super::builtin::engine::Engine;
use super::frame::{self, Frame, FrameError, Kind};
use super::inbox::{Arrival, Claim, Inbox};
use super::message::{Begin, Hello, Refuse, Welcome, from_json, json, read_blocks};

/// What a receiver is and allows.
#[derive(Debug)]
pub struct Receiver {
    /// What senders must agree with.
    pub hello: Hello,
    /// KV bytes of a block.
    pub block_bytes: usize,
    /// Longest silence within a transfer.
    pub idle: Duration,
    /// Connections at a time.
    pub max_connections: usize,
    /// Where the turns are.
    pub inbox: Arc<Inbox>,
}

impl Receiver {
    /// The receiver of an engine's inbox.
    pub fn of(engine: &Engine) -> Self {
        let limits = &engine.config.limits;
        Self {
            hello: engine.hello(),
            block_bytes: engine.config.kv.block_bytes(),
            idle: limits.transfer_idle,
            max_connections: limits.transfer_connections,
            inbox: engine.inbox.clone(),
        }
    }
}

/// Serves connections until it is dropped.
pub async fn listen(receiver: Arc<Receiver>, listener: TcpListener) {
    let most = receiver.max_connections;
    accept(listener, most, |stream| serve(receiver.clone(), stream)).await;
}

/// Accepts connections, at most `most` at a time, until it is dropped; that ends them too.
pub(in crate::node) async fn accept<F>(listener: TcpListener, most: usize, serve: impl Fn(TcpStream) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= most {
            connections.join_next().await;
            continue;
        }
        match listener.accept().await {
            // Without it every acknowledgement waits for the next one.
            Ok((stream, _)) if stream.set_nodelay(true).is_ok() => {
                connections.spawn(serve(stream));
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "KV listener");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Serves one connection: handshake, then one transfer after another. A refusal ends it.
pub async fn serve(receiver: Arc<Receiver>, mut stream: impl Io + Hangup) {
    if let Err(reason) = transfers(&receiver, &mut stream).await {
        refuse(&mut stream, reason, receiver.idle).await;
    }
}

/// Tells the sender why, and ends the connection.
pub(in crate::node) async fn refuse(stream: &mut impl Io, reason: String, patience: Duration) {
    tracing::debug!(%reason, "KV connection refused");
    let refuse = json(Kind::Refuse, &Refuse { reason });
    // The sender may be gone or deaf; it must not hold this task.
    let told = async {
        frame::write(stream, &refuse).await.ok();
        stream.shutdown().await.ok();
    };
    timeout(patience, told).await.ok();
}

/// The receiver's side of the handshake: what both sides must agree on is checked once per connection.
pub(in crate::node) async fn handshake(
    stream: &mut impl Io,
    ours: &Hello,
    idle: Duration,
) -> Result<Hello, String> {
    let hello = next(stream, idle).await?.ok_or("closed before the handshake")?;
    let hello: Hello = expect(&hello, Kind::Hello, "hello")?;
    if let Some(reason) = ours.refusal(&hello) {
        return Err(reason);
    }
    let welcome = json(Kind::Welcome, &Welcome { epoch: ours.epoch });
    frame::write(stream, &welcome).await.map_err(|e| e.to_string())?;
    Ok(hello)
}

async fn transfers(receiver: &Receiver, stream: &mut (impl Io + Hangup)) -> Result<(), String> {
    handshake(stream, &receiver.hello, receiver.idle).await?;
    // Between transfers a connection may rest as long as it likes; it costs a place.
    while let Some(first) = rest(stream).await? {
        let begin: Begin = expect(&first, Kind::Begin, "begin")?;
        if begin.epoch != receiver.hello.epoch {
            return Err("the transfer is meant for an earlier start of this node".into());
        }
        let claim = receiver.inbox.claim(&begin.transfer_id, stream.hung_up()).await?;
        transfer(receiver, stream, claim, begin).await?;
        frame::write(stream, &frame::frame(Kind::Ack, b"")).await.map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Hands one transfer to its turn; `Ok` when the turn stored all of it.
async fn transfer(
    receiver: &Receiver,
    stream: &mut impl Io,
    claim: Claim,
    begin: Begin,
) -> Result<(), String> {
    let Claim { arrivals, mut verdict } = claim;
    let pump = async {
        let mut arrival = Arrival::Begin(begin);
        loop {
            let end = matches!(arrival, Arrival::End);
            // A turn that is gone has closed the verdict too: that says why.
            if arrivals.send(arrival).await.is_err() || end {
                return std::future::pending::<String>().await;
            }
            arrival = match arrive(receiver, stream).await {
                Ok(arrival) => arrival,
                Err(reason) => {
                    arrivals.send(Arrival::Failed(reason.clone())).await.ok();
                    return reason;
                }
            };
        }
    };
    tokio::select! {
        biased;
        answer = &mut verdict => match answer {
            Ok(answer) => answer,
            Err(_) => Err("the turn was cancelled".into()),
        },
        reason = pump => Err(reason),
    }
}

async fn arrive(receiver: &Receiver, stream: &mut impl Io) -> Result<Arrival, String> {
    let Some(Frame { kind, payload }) = next(stream, receiver.idle).await? else {
        return Err("the sender closed the connection within the transfer".into());
    };
    match kind {
        Kind::Blocks => read_blocks(payload, receiver.block_bytes).map(Arrival::Blocks),
        Kind::End => Ok(Arrival::End),
        other => Err(format!("unexpected {other:?} within a transfer")),
    }
}

/// The next frame within the allowed silence; `None` when the sender closed between frames.
pub(in crate::node) async fn next(stream: &mut impl Io, idle: Duration) -> Result<Option<Frame>, String> {
    match timeout(idle, rest(stream)).await {
        Ok(frame) => frame,
        Err(_) => Err(format!("no KV frame for {} ms", idle.as_millis())),
    }
}

/// The next frame, whenever it comes; `None` when the sender closed between frames.
pub(in crate::node) async fn rest(stream: &mut impl Io) -> Result<Option<Frame>, String> {
    match frame::read(stream).await {
        Ok(frame) => Ok(Some(frame)),
        Err(FrameError::Closed) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn expect<T: serde::de::DeserializeOwned>(frame: &Frame, kind: Kind, what: &str) -> Result<T, String> {
    if frame.kind != kind {
        return Err(format!("expected {what}, got {:?}", frame.kind));
    }
    from_json(what, &frame.payload)
}
