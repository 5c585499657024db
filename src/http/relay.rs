//! A worker's answer on its way to the client: the bytes as they come, no faster than the client takes them.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use actix_web::body::{BodySize, MessageBody};
use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use tokio::time::{Instant, Sleep, sleep};

use super::access::Caller;
use super::backend::Turn;
use super::errors::{ApiError, WORKER_DIED, WORKER_SILENT};
use super::meter::Meter;
use super::observe::Observer;
use crate::actors::api::{DispatchPlan, Failure};
use crate::engines::Engine;
use crate::engines::client::{Body, Client, Request};
use crate::keeper::handback::HandBack;
use crate::prompt::Api;
use crate::telemetry;
use crate::translate::{Broken, Translator};

/// A broken answer's connection stays open this long, so that what came before (and the error event) gets
/// out: actix-web drops what it has not written yet when a body fails. Then it is cut without an end.
const LINGER: Duration = Duration::from_millis(100);

/// The answer of a served turn as a response body. Dropped early (the client left), it closes the worker's
/// connection and cancels the turn.
pub(super) struct Relay<T: Turn> {
    first: Option<Bytes>,
    body: Body,
    size: BodySize,
    api: Api,
    sse: bool,
    /// Turns the answer into the client's API.
    back: Option<Translator>,
    observer: Observer,
    turn: Option<T>,
    lost: Option<LocalBoxFuture<'static, Failure>>,
    meter: Meter,
    idle: Idle,
    after: Option<After>,
    phase: Phase,
    at_line_start: bool,
    _caller: Caller,
}

/// What a served turn's request is still needed for.
pub(super) struct After {
    pub engine: Engine,
    pub client: Client,
    pub request: Request,
}

impl After {
    /// Lets D hand its KV back. Nobody waits for it.
    fn run(self, plan: &DispatchPlan, backs: Vec<HandBack>) {
        let (id, decode) = (plan.request_id.clone(), plan.decode.url.clone());
        actix_web::rt::spawn(async move {
            for back in backs {
                let pair = (&*decode, &*back.to);
                let how = self.engine.hand_back(&self.client, &id, &self.request, pair).await;
                back.done(how);
            }
        });
    }
}

/// Where the relay is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// Nothing more comes; the cut is next.
    Cutting,
    Over,
}

/// The worker's silence. One timer per stream, moved only when it fires.
struct Idle {
    limit: Duration,
    heard: Instant,
    timer: Pin<Box<Sleep>>,
}

/// Ends a response without a proper end.
#[derive(Debug, thiserror::Error)]
#[error("the worker's answer broke off")]
pub(super) struct BrokenOff;

impl<T: Turn> Relay<T> {
    pub fn new(
        (first, body): (Bytes, Body),
        (api, sse, back): (Api, bool, Option<Translator>),
        turn: T,
        meter: Meter,
        idle_limit: Duration,
        after: Option<After>,
        caller: Caller,
    ) -> Self {
        let size = match body.length().filter(|_| back.is_none()) {
            Some(left) => BodySize::Sized(left + first.len() as u64),
            None => BodySize::Stream,
        };
        let idle = Idle { limit: idle_limit, heard: Instant::now(), timer: Box::pin(sleep(idle_limit)) };
        let observer = if sse { Observer::sse(api) } else { Observer::json(api) };
        meter.first_byte(turn.plan().mode.as_str());
        Self {
            first: Some(first),
            body,
            size,
            api,
            sse,
            back,
            observer,
            lost: Some(turn.lost()),
            turn: Some(turn),
            meter,
            idle,
            after,
            phase: Phase::Open,
            at_line_start: true,
            _caller: caller,
        }
    }

    /// Whether D stopped to answer. A P is done when D has begun; its loss ends nothing.
    fn is_lost(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(Poll::Ready(failure)) = self.lost.as_mut().map(|lost| lost.as_mut().poll(cx)) else {
            return false;
        };
        self.lost = None;
        failure == Failure::DecodeUnreachable
    }

    /// The worker's bytes in the client's API: often none, when they are translated.
    fn spoken(&mut self, bytes: Bytes) -> Result<Bytes, Broken> {
        match &mut self.back {
            Some(back) => back.feed(&bytes).map(Bytes::from),
            None => Ok(bytes),
        }
    }

    /// What a translation has left to say when the worker is done.
    fn rest(&mut self) -> Result<Bytes, Broken> {
        self.back.take().map_or(Ok(Bytes::new()), |mut back| back.end().map(Bytes::from))
    }

    /// The worker's answer cannot be translated.
    fn garbled(&mut self, why: Broken, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BrokenOff>>> {
        tracing::warn!(%why, "an answer cannot be translated");
        self.break_off(WORKER_DIED, cx)
    }

    fn pass(&mut self, bytes: Bytes) -> Poll<Option<Result<Bytes, BrokenOff>>> {
        self.observer.feed(&bytes);
        // A client that has read the end may send the next turn at once.
        if self.observer.is_over()
            && let Some(turn) = &self.turn
        {
            turn.complete(self.observer.seen());
        }
        self.at_line_start = bytes.last().is_none_or(|last| *last == b'\n');
        Poll::Ready(Some(Ok(bytes)))
    }

    /// The answer is complete, or as complete as the client wanted it.
    fn finish(&mut self) {
        let Some(turn) = self.turn.take() else { return };
        let seen = std::mem::replace(&mut self.observer, Observer::json(self.api)).into_seen();
        if seen.error {
            self.meter.ends("failed", "worker_error");
            turn.broken(true);
            return;
        }
        let plan = turn.plan();
        self.meter.ends(plan.mode.as_str(), plan.rung.as_str());
        if plan.replaced > 0 {
            telemetry::replaced();
        }
        telemetry::tokens(seen.prompt_tokens, seen.cached_tokens, seen.completion_tokens);
        turn.complete(&seen);
        if let Some(after) = self.after.take() {
            let backs = turn.hand_backs();
            if !backs.is_empty() {
                after.run(turn.plan(), backs);
            }
        }
        turn.finished(seen);
    }

    /// The worker broke off: an error event where the client can read one, then a cut.
    fn break_off(
        &mut self,
        code: &'static str,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, BrokenOff>>> {
        self.meter.ends("failed", code);
        if let Some(turn) = self.turn.take() {
            turn.broken(false);
        }
        self.phase = Phase::Cutting;
        self.idle.timer.as_mut().reset(Instant::now() + LINGER);
        if !self.sse {
            return self.cut(cx);
        }
        let error = ApiError::broken_off(code);
        let gap = if self.at_line_start { "" } else { "\n\n" };
        let event = error.spoken(self.api.into()).event(self.api, self.observer.next_event());
        Poll::Ready(Some(Ok(format!("{gap}{event}").into())))
    }

    /// Waits until what was passed on is out, then cuts.
    fn cut(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BrokenOff>>> {
        std::task::ready!(self.idle.timer.as_mut().poll(cx));
        self.phase = Phase::Over;
        Poll::Ready(Some(Err(BrokenOff)))
    }
}

impl Idle {
    /// Whether the worker has been silent for too long.
    fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        while self.timer.as_mut().poll(cx).is_ready() {
            let until = self.heard + self.limit;
            if until <= Instant::now() {
                return true;
            }
            self.timer.as_mut().reset(until);
        }
        false
    }
}

impl<T: Turn> MessageBody for Relay<T> {
    type Error = BrokenOff;

    fn size(&self) -> BodySize {
        self.size
    }

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, BrokenOff>>> {
        let this = self.get_mut();
        match this.phase {
            Phase::Open => {}
            Phase::Over => return Poll::Ready(None),
            Phase::Cutting => return this.cut(cx),
        }
        let next = loop {
            let next = match this.first.take() {
                Some(first) => Poll::Ready(Some(Ok(first))),
                None => this.body.poll_chunk(cx),
            };
            let spoken = match next {
                Poll::Ready(Some(Ok(bytes))) => {
                    this.idle.heard = Instant::now();
                    this.spoken(bytes)
                }
                Poll::Ready(None) if this.back.is_some() => this.rest(),
                other => break other,
            };
            match spoken {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => return this.pass(bytes),
                Err(why) => return this.garbled(why, cx),
            }
        };
        match next {
            // Handled above.
            Poll::Ready(Some(Ok(bytes))) => this.pass(bytes),
            Poll::Ready(None)
                if this.sse && !this.observer.seen().complete && !this.observer.seen().error =>
            {
                // A proper end of the transfer, but the stream itself never ended.
                this.break_off(WORKER_DIED, cx)
            }
            Poll::Ready(None) => {
                this.phase = Phase::Over;
                this.finish();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(_))) => this.break_off(WORKER_DIED, cx),
            Poll::Pending if this.is_lost(cx) => this.break_off(WORKER_DIED, cx),
            Poll::Pending if this.idle.is_over(cx) => this.break_off(WORKER_SILENT, cx),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: Turn> Drop for Relay<T> {
    fn drop(&mut self) {
        // Many clients leave at the last event and don't wait for the end of the transfer.
        if self.sse && self.first.is_none() && self.observer.seen().complete {
            self.finish();
        }
    }
}
