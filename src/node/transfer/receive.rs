//! The receiving side: a listener, and one task per connection that hands transfers to their turns.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

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

/// Serves connections until it is dropped.
pub async fn listen(receiver: Arc<Receiver>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        if connections.len() >= receiver.max_connections {
            connections.join_next().await;
            continue;
        }
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.spawn(serve(receiver.clone(), stream));
            }
            Err(error) => {
                tracing::warn!(%error, "KV listener");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// One connection: handshake, then one transfer after another. A refusal ends it.
async fn serve(receiver: Arc<Receiver>, mut stream: TcpStream) {
    let outcome = match stream.set_nodelay(true) {
        Ok(()) => transfers(&receiver, &mut stream).await,
        Err(error) => Err(error.to_string()),
    };
    if let Err(reason) = outcome {
        tracing::debug!(%reason, "KV connection refused");
        let refuse = json(Kind::Refuse, &Refuse { reason });
        // The sender may be gone or deaf; it must not hold this task.
        let told = async {
            frame::write(&mut stream, &refuse).await.ok();
            stream.shutdown().await.ok();
        };
        timeout(receiver.idle, told).await.ok();
    }
}

async fn transfers(receiver: &Receiver, stream: &mut TcpStream) -> Result<(), String> {
    let hello = next(receiver, stream).await?.ok_or("closed before the handshake")?;
    let hello: Hello = expect(&hello, Kind::Hello, "hello")?;
    if let Some(reason) = receiver.hello.refusal(&hello) {
        return Err(reason);
    }
    let welcome = json(Kind::Welcome, &Welcome { epoch: receiver.hello.epoch });
    frame::write(stream, &welcome).await.map_err(|e| e.to_string())?;
    // Between transfers a connection may rest as long as it likes; it costs a place.
    while let Some(first) = rest(stream).await? {
        let begin: Begin = expect(&first, Kind::Begin, "begin")?;
        if begin.epoch != receiver.hello.epoch {
            return Err("the transfer is meant for an earlier start of this node".into());
        }
        let claim = receiver.inbox.claim(&begin.transfer_id).await?;
        transfer(receiver, stream, claim, begin).await?;
        frame::write(stream, &frame::frame(Kind::Ack, b"")).await.map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Hands one transfer to its turn; `Ok` when the turn stored all of it.
async fn transfer(
    receiver: &Receiver,
    stream: &mut TcpStream,
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

async fn arrive(receiver: &Receiver, stream: &mut TcpStream) -> Result<Arrival, String> {
    let Some(Frame { kind, payload }) = next(receiver, stream).await? else {
        return Err("the sender closed the connection within the transfer".into());
    };
    match kind {
        Kind::Blocks => read_blocks(payload, receiver.block_bytes).map(Arrival::Blocks),
        Kind::End => Ok(Arrival::End),
        other => Err(format!("unexpected {other:?} within a transfer")),
    }
}

/// The next frame within the allowed silence; `None` when the sender closed between frames.
async fn next(receiver: &Receiver, stream: &mut TcpStream) -> Result<Option<Frame>, String> {
    match timeout(receiver.idle, rest(stream)).await {
        Ok(frame) => frame,
        Err(_) => Err(format!("no KV frame for {} ms", receiver.idle.as_millis())),
    }
}

async fn rest(stream: &mut TcpStream) -> Result<Option<Frame>, String> {
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
