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
use super::resume::Resume;
use crate::actors::api::{DispatchPlan, Failure};
use crate::engines::Engine;
use crate::engines::answer::{Answer, AnswerBody};
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
    /// `None`: the leg is closed.
    body: Option<Body>,
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
    resume: Option<Resume>,
    moving: Option<Moving<T>>,
    phase: Phase,
    at_line_start: bool,
    _caller: Caller,
}

/// A turn on its way to another worker.
type Moving<T> = LocalBoxFuture<'static, Option<(T, Answer)>>;

/// How an answer is passed on.
pub(super) struct How {
    pub api: Api,
    pub sse: bool,
    /// Turns it into the client's API.
    pub back: Option<Translator>,
    /// Longest silence.
    pub idle: Duration,
    pub after: Option<After>,
    pub resume: Option<Resume>,
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
    /// The worker broke off, for this reason; another one is asked for the rest.
    Moving(&'static str),
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
        How { api, sse, back, idle: limit, after, resume }: How,
        turn: T,
        meter: Meter,
        caller: Caller,
    ) -> Self {
        let size = match body.length().filter(|_| back.is_none() && resume.is_none()) {
            Some(left) => BodySize::Sized(left + first.len() as u64),
            None => BodySize::Stream,
        };
        let idle = Idle { limit, heard: Instant::now(), timer: Box::pin(sleep(limit)) };
        let observer = if sse { Observer::sse(api) } else { Observer::json(api) };
        meter.first_byte(turn.plan().mode.as_str());
        Self {
            first: Some(first),
            body: Some(body),
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
            resume,
            moving: None,
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

    /// The worker's bytes in the client's API: often none, when they are translated, or passed on in whole events.
    fn spoken(&mut self, bytes: Bytes) -> Result<Bytes, Broken> {
        match (&mut self.back, &mut self.resume) {
            (Some(back), _) => back.feed(&bytes).map(Bytes::from),
            (None, Some(resume)) => Ok(resume.whole(&bytes)),
            (None, None) => Ok(bytes),
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

    /// Asks another worker for the rest, where that can be done.
    fn elsewhere(&mut self) -> Option<Moving<T>> {
        let rest = self.resume.as_mut()?.rest()?;
        Some(Box::pin(rest.from(self.turn.take()?)))
    }

    /// Whether the rest comes, from another worker.
    fn moved(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let Some(moving) = &mut self.moving else { return Poll::Ready(false) };
        let moved = std::task::ready!(moving.as_mut().poll(cx));
        self.moving = None;
        let Some((turn, Answer { body: AnswerBody::Stream(first, body), .. })) = moved else {
            self.resume = None;
            return Poll::Ready(false);
        };
        telemetry::resumed();
        (self.first, self.body) = (Some(first), Some(body));
        (self.lost, self.turn) = (Some(turn.lost()), Some(turn));
        (self.idle.heard, self.phase) = (Instant::now(), Phase::Open);
        Poll::Ready(true)
    }

    /// The worker broke off: an error event where the client can read one, then a cut.
    fn break_off(
        &mut self,
        code: &'static str,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, BrokenOff>>> {
        self.body = None;
        self.moving = self.elsewhere();
        if self.moving.is_some() {
            self.phase = Phase::Moving(code);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if planted!(CleanEndAfterDeath) {
            self.finish();
            self.phase = Phase::Over;
            let end = if self.at_line_start { "data: [DONE]\n\n" } else { "\n\ndata: [DONE]\n\n" };
            return Poll::Ready(Some(Ok(Bytes::from_static(end.as_bytes()))));
        }
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
            Phase::Moving(code) => {
                if !std::task::ready!(this.moved(cx)) {
                    return this.break_off(code, cx);
                }
            }
            Phase::Over => return Poll::Ready(None),
            Phase::Cutting => return this.cut(cx),
        }
        let next = loop {
            let next = match (this.first.take(), &mut this.body) {
                (Some(first), _) => Poll::Ready(Some(Ok(first))),
                (None, Some(body)) => body.poll_chunk(cx),
                (None, None) => Poll::Ready(None),
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
