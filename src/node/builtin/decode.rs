//! The D leg of a turn: room, transfer, the missing blocks, then token after token.

use std::sync::Arc;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::core::ledger::AdmitRequest;
use crate::core::types::{BlockHash, SessionId, StopKind, Tokens};
use crate::prompt::{BLOCK_BYTES, BYTES_PER_TOKEN, ChainState};
use crate::wire::plan::{Pull, Report, SyncTarget};

use super::super::error::NodeError;
use super::engine::{Engine, Entry};
use super::lane::pass;
use super::model::{Sampler, tokens};
use super::request::Job;
use super::running::Running;
use super::script::{Call, Playback};

/// Most tokens handed on at once when the modelled time is ahead of the timer.
const BURST: usize = 8;

/// Whose KV a turn's becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    /// A session's.
    Session(SessionId),
    /// A plain request's: the conversation it goes on with, found by its blocks.
    Plain,
    /// Nobody's.
    OneShot,
}

/// What a D has to do for a turn.
#[derive(Debug, Clone)]
pub struct DecodeLeg {
    /// Id of the attempt.
    pub request_id: String,
    /// Whose turn.
    pub owner: Owner,
    /// On a lease, or by force.
    pub entry: Entry,
    /// Blocks that must be held already.
    pub reuse_blocks: usize,
    /// The transfer to wait for.
    pub pull: Option<Pull>,
    /// Where the session's KV is pushed to.
    pub sync: Vec<SyncTarget>,
}

/// Why a turn's answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// By itself.
    Stop,
    /// With a tool call, because the request insists on one or brings one along.
    ToolCalls,
    /// At the request's limit, or for lack of room.
    Length,
}

impl Finish {
    /// OpenAI's word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::ToolCalls => "tool_calls",
            Self::Length => "length",
        }
    }
}

/// Where the answer comes from.
#[derive(Debug)]
enum Source {
    Model(Sampler),
    Script(Playback),
}

impl Source {
    /// The next token; what the client sees of it goes to `out`.
    fn token(&mut self, last: bool, out: &mut String) -> SmallVec<[u8; BYTES_PER_TOKEN]> {
        match self {
            Self::Script(playback) => playback.token(out).into(),
            Self::Model(sampler) => {
                let token = sampler.token(last);
                out.extend(token.map(char::from));
                token.into()
            }
        }
    }
}

/// A turn whose prompt is complete and whose answer comes now. Dropping it cancels the turn.
#[derive(Debug)]
pub struct Decoding {
    engine: Arc<Engine>,
    running: Option<Running>,
    source: Source,
    text: Vec<u8>,
    state: ChainState,
    chain: Vec<BlockHash>,
    planned: Tokens,
    ends: bool,
    due: Instant,
    calls: Vec<Call>,
    /// What was reused, arrived and was computed.
    pub report: Report,
    /// Length of the prompt.
    pub prompt_tokens: Tokens,
    /// Length of the answer so far.
    pub completion_tokens: Tokens,
}

impl Engine {
    /// Does all of a turn that comes before its first token.
    ///
    /// # Errors
    /// 409 when the plan relies on what is not there, 429 without room, 502 when the transfer fails.
    pub async fn decode(self: &Arc<Self>, job: Job, leg: DecodeLeg) -> Result<Decoding, NodeError> {
        // From here on the transfer may come, whatever the turn waits for.
        let inbound = match &leg.pull {
            Some(pull) => Some(self.inbox.announce(&pull.transfer_id).map_err(NodeError::plan_mismatch)?),
            None => None,
        };
        let mut running = self.begin_decode(&job, &leg).await?;
        if running.reuse() < leg.reuse_blocks {
            let message = format!("{} blocks held, the plan relies on {}", running.reuse(), leg.reuse_blocks);
            return Err(NodeError::plan_mismatch(message));
        }
        running.sync_to(&leg.sync);
        let (mut remote, mut transfer_us) = (0, 0);
        if let (Some(inbound), Some(pull)) = (inbound, &leg.pull) {
            let arrived = self.receive(&mut running, inbound, pull).await?;
            remote = running.held() - arrived.held_there.clamp(running.reuse(), running.held());
            transfer_us = self.config.cost.modelled_us(arrived.took);
        }
        let transferred = (running.held() - running.reuse()) as Tokens * self.block();
        let begun = Instant::now();
        let computed = running.compute(&job.text, false, |_, _| {}).await?;
        let report = Report {
            transfer_us,
            compute_us: self.config.cost.modelled_us(begun.elapsed()),
            reused: running.reuse() as Tokens * self.block(),
            transferred,
            computed,
            computed_remote: remote as Tokens * self.block(),
        };
        Ok(self.first(job, running, report))
    }

    async fn begin_decode(self: &Arc<Self>, job: &Job, leg: &DecodeLeg) -> Result<Running, NodeError> {
        let id = &leg.request_id;
        let session = match &leg.owner {
            Owner::Session(session) => Some(session.clone()),
            Owner::Plain => Some(self.with(|s, _| s.plain_session(&job.chain, id))),
            Owner::OneShot => None,
        };
        let turn = AdmitRequest {
            request_id: id.clone(),
            session: session.clone().unwrap_or_else(|| SessionId::new(format!("once/{id}"))),
            turn: 0,
            chain: job.chain.clone(),
            input_len: job.input_tokens(),
            output_reserve: job.output - tokens(job.answered),
        };
        self.begin(turn, session, leg.entry).await
    }

    /// Reads all KV held and is ready for the first token.
    fn first(self: &Arc<Self>, job: Job, running: Running, report: Report) -> Decoding {
        let prompt_tokens = job.prompt_tokens();
        let source = match job.script {
            Some(playback) => Source::Script(playback),
            None => {
                // The answer is one to the prompt, however much of it was said elsewhere.
                let (prompt, said) = job.text.split_at(job.text.len() - job.answered);
                let blocks = prompt.len() / BLOCK_BYTES;
                let kv = running.kv().take(blocks).map(|kv| &**kv);
                let mut sampler = Sampler::new(kv, &prompt[blocks * BLOCK_BYTES..]);
                sampler.skip(said);
                Source::Model(sampler)
            }
        };
        Decoding {
            engine: self.clone(),
            source,
            prompt_tokens,
            completion_tokens: tokens(job.answered),
            planned: job.output,
            ends: job.ends,
            chain: job.chain.to_vec(),
            state: job.state,
            text: job.text,
            due: Instant::now(),
            running: Some(running),
            calls: job.calls,
            report,
        }
    }
}

impl Decoding {
    /// Prompt tokens that neither this node nor the P of this turn computed.
    pub fn cached_tokens(&self) -> Tokens {
        self.prompt_tokens.saturating_sub(self.report.computed + self.report.computed_remote)
    }

    /// The text of the next tokens, as they become due; `None` once the turn has ended and is committed.
    ///
    /// # Errors
    /// A broken invariant; the turn is over and nothing of it stays.
    pub async fn next(&mut self) -> Result<Option<String>, NodeError> {
        let (mut out, mut burst) = (String::new(), 0);
        while self.completion_tokens < self.planned && burst < BURST {
            if burst == 0 {
                self.due += self.step();
                pass(self.due).await;
            } else if self.due + self.step() > Instant::now() {
                break;
            } else {
                self.due += self.step();
            }
            let Some(running) = &mut self.running else { break };
            if !running.cover(tokens(self.text.len() + BYTES_PER_TOKEN)).await {
                (self.planned, self.ends) = (self.completion_tokens, false);
                break;
            }
            let last = self.completion_tokens + 1 == self.planned;
            let token = self.source.token(last, &mut out);
            self.append(&token)?;
            burst += 1;
        }
        if burst == 0 {
            self.commit().await;
            return Ok(None);
        }
        Ok(Some(out))
    }

    /// How the answer ended, or will.
    pub fn finish(&self) -> Finish {
        match self.calls.is_empty() {
            _ if !self.ends => Finish::Length,
            false => Finish::ToolCalls,
            true => Finish::Stop,
        }
    }

    /// The calls a turn ends with, if it does.
    pub fn calls(&self) -> &[Call] {
        if self.finish() == Finish::ToolCalls { &self.calls } else { &[] }
    }

    fn step(&self) -> std::time::Duration {
        let (running, load) = self.engine.with(|s, _| (s.running(), s.ledger.load()));
        let active = load.active as f64 / load.k_d.max(1) as f64;
        let others = running.saturating_sub(1) as u32;
        self.engine.config.cost.decode_step(others, active, self.engine.lane.busy())
    }

    fn append(&mut self, token: &[u8]) -> Result<(), NodeError> {
        self.text.extend_from_slice(token);
        self.state.extend(&mut self.chain, token);
        self.completion_tokens += 1;
        let Some(running) = &mut self.running else { return Ok(()) };
        let from = running.held();
        if self.chain.len() > from {
            let previous = running.kv().last().cloned();
            let new = &self.text[from * BLOCK_BYTES..self.chain.len() * BLOCK_BYTES];
            running.store(self.engine.config.kv.blocks(previous, new))?;
        }
        Ok(())
    }

    async fn commit(&mut self) {
        let stop = match self.finish() {
            Finish::Stop => StopKind::EndTurn,
            Finish::ToolCalls => StopKind::ToolUse,
            Finish::Length => StopKind::Unknown,
        };
        if let Some(running) = self.running.take() {
            let stored = running.commit(&self.chain, tokens(self.text.len()), stop);
            self.engine.backed_up(stored).await;
        }
    }
}
