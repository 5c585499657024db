//! `PrefillKvReceiver` of the sync document: the P's listener for D→P pushes. Its frames are checked and copied
//! into the backup tier one by one, so what it buffers is bounded and apart from the live pool.

use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::core::types::BlockHash;
use crate::net::Io;

use super::super::builtin::engine::Engine;
use super::super::transfer::frame::{self, Frame, Kind};
use super::super::transfer::message::{Hello, Offer, json, read_blocks, read_offer, want};
use super::super::transfer::receive::{accept, handshake, next, refuse, rest};
use super::tier::InsertExternalResult;

/// What the connections share.
#[derive(Debug)]
pub struct PrefillKvReceiver {
    engine: Arc<Engine>,
    hello: Hello,
    /// Pushes under way: each has at most one frame in memory.
    buffers: Semaphore,
}

/// Serves connections until it is dropped. `listener` may be another runtime's.
pub async fn listen(engine: Arc<Engine>, listener: TcpListener) {
    let listener = match listener.into_std().and_then(TcpListener::from_std) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "no D→P pushes are taken"),
    };
    let most = engine.config.limits.transfer_connections;
    let receiver = PrefillKvReceiver::new(engine);
    accept(listener, most, |stream| serve(receiver.clone(), stream)).await;
}

/// Serves one connection.
pub async fn serve(receiver: Arc<PrefillKvReceiver>, mut stream: impl Io) {
    if let Err(reason) = receiver.pushes(&mut stream).await {
        refuse(&mut stream, reason, receiver.engine.config.limits.transfer_idle).await;
    }
}

impl PrefillKvReceiver {
    /// What takes pushes into an engine's tier.
    pub fn new(engine: Arc<Engine>) -> Arc<Self> {
        let buffers = Semaphore::new(engine.config.limits.sync_buffers);
        Arc::new(Self { hello: engine.hello(), buffers, engine })
    }

    /// One connection: handshake, then one push after another. A refusal ends it.
    async fn pushes(&self, stream: &mut impl Io) -> Result<(), String> {
        let idle = self.engine.config.limits.transfer_idle;
        let from = handshake(stream, &self.hello, idle).await?.from;
        while let Some(Frame { kind, payload }) = rest(stream).await? {
            if kind != Kind::Offer {
                return Err(format!("expected an offer, got {kind:?}"));
            }
            let offer = read_offer(payload)?;
            if offer.head.epoch != self.hello.epoch {
                return Err("the push is meant for an earlier start of this node".into());
            }
            let place = timeout(idle, self.buffers.acquire()).await;
            let Ok(Ok(_place)) = place else { return Err("the receive buffer is full".into()) };
            let result = self.push(stream, &from, &offer).await?;
            frame::write(stream, &json(Kind::Ack, &result)).await.map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    async fn push(
        &self,
        stream: &mut impl Io,
        from: &str,
        offer: &Offer,
    ) -> Result<InsertExternalResult, String> {
        let (session, limits) = (&offer.head.session, &self.engine.config.limits);
        let wanted = self.engine.with(|s, _| s.wanted(&offer.hashes, from, session));
        frame::write(stream, &want(&wanted)).await.map_err(|e| e.to_string())?;
        let missing: Vec<BlockHash> =
            offer.hashes.iter().zip(wanted).filter(|(_, w)| *w).map(|(hash, _)| *hash).collect();
        let shared = (offer.hashes.len() - missing.len()) as u32;
        let mut result = InsertExternalResult { shared, ..InsertExternalResult::default() };
        let mut place = 0;
        loop {
            let frame = next(stream, limits.transfer_idle).await?;
            let Frame { kind, payload } = frame.ok_or("the sender closed the connection within a push")?;
            match kind {
                Kind::Blocks => {
                    let arrived = read_blocks(payload, self.engine.config.kv.block_bytes())?;
                    let end = arrived.first + arrived.blocks.len();
                    let expected = missing.get(place..end).filter(|_| arrived.first == place);
                    if !expected.is_some_and(|e| arrived.blocks.iter().map(|(hash, _)| hash).eq(e)) {
                        return Err("blocks that were not asked for".into());
                    }
                    place = end;
                    let one = self.engine.with(|s, _| s.insert_external(arrived.blocks, from, session));
                    result.inserted += one.inserted;
                    result.shared += one.shared;
                    result.dropped += one.dropped;
                }
                Kind::End if place == missing.len() => break,
                Kind::End => return Err("the push ended before its last block".into()),
                other => return Err(format!("unexpected {other:?} within a push")),
            }
        }
        // What came over the wire and what was here before are now one chain: its head leaves last.
        let chain: Vec<BlockHash> = offer.hashes.iter().rev().copied().collect();
        self.engine.with(|s, _| s.backups.tier.touch(&chain));
        Ok(result)
    }
}
