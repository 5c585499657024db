//! A request, read: everything about it that doesn't depend on a lane.

use std::fmt::Write as _;
use std::sync::Mutex;

use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

use crate::core::types::SessionId;
use crate::prompt::{self, Api, BadBody, BodyIds, Fields, Known, Layout, Prefixes, Prompt, is_count_tokens};

use super::class::{Class, Declared};
use super::estimate::{Estimate, Lies, Size};
use super::headers::Headers;
use super::hints::Samples;
use super::id::valid;
use super::identity::{Identity, Strength};
use super::line::Model;
use super::lineage::{RESPONSE, anonymous_heads, minted_key};
use super::registry::Registry;
use super::store::LaneRef;
use super::turn::{How, Incoming, Stateful, Ticket, Turn};

/// A request, read but not placed. Reading is most of the work and needs the registry for a moment only:
/// [`Request::read`] outside the lock, [`Registry::place`] inside.
#[derive(Debug)]
pub struct Request<'a> {
    pub(super) api: Api,
    pub(super) scope: u64,
    pub(super) prompt: Prompt<'a>,
    pub(super) identity: Identity<'a>,
    pub(super) declared: Declared<'a>,
    /// It only counts tokens or warms up.
    pub(super) probe: bool,
    /// Samples of its messages, by which its lane is found next time.
    pub(super) samples: Option<Samples>,
}

/// Where [`Request::read`] asks what is known of a body: a registry, or one behind a lock.
pub trait Lookup {
    /// What is known of a body with these samples.
    fn lookup(&self, samples: &Samples) -> Option<Known>;
}

impl Lookup for Registry {
    fn lookup(&self, samples: &Samples) -> Option<Known> {
        let lane = samples.longest_first().find_map(|digest| self.hints.get(digest))?;
        Some(self.store.get(lane)?.live.as_deref()?.seen.clone())
    }
}

impl Lookup for Mutex<Registry> {
    fn lookup(&self, samples: &Samples) -> Option<Known> {
        // Not knowing is always right, so a poisoned lock costs time only.
        self.lock().ok()?.lookup(samples)
    }
}

impl<'a> Request<'a> {
    /// Reads a request, from where `registry` knows it on.
    ///
    /// # Errors
    /// [`BadBody`] when the body cannot be routed: the client gets 400.
    pub fn read(req: &Incoming<'a>, registry: &impl Lookup) -> Result<Self, BadBody> {
        let api = Api::from_path(req.path).ok_or_else(|| BadBody {
            message: format!("no API is served under {}", req.path),
            param: None,
        })?;
        let guess = Guess { registry, seed: seed(req.headers, api) };
        let prompt = prompt::read(api, req.body, &guess)?;
        let identity = Identity::of(req.headers, &prompt.fields.ids);
        let declared = Declared::of(req.headers, &prompt.fields.ids, identity.key.as_deref());
        Ok(Self {
            api,
            scope: scope(req.headers, &prompt.fields.model),
            probe: is_count_tokens(req.path) || declared.class == Some(Class::Probe),
            samples: prompt.array_at.map(|at| Samples::of(&req.body[at..], guess.seed)),
            prompt,
            identity,
            declared,
        })
    }

    /// The body's fields.
    pub fn fields(&self) -> &Fields<'a> {
        &self.prompt.fields
    }
}

impl Request<'_> {
    /// Names of the groups the request may belong to, its own first.
    pub(super) fn groups(&self) -> Vec<String> {
        let scope = self.scope;
        match &self.identity.key {
            Some(key) => vec![format!("{scope:016x}/{key}")],
            None => {
                let heads = anonymous_heads(&self.prompt);
                heads.iter().map(|head| format!("{scope:016x}/anon-{head:016x}")).collect()
            }
        }
    }

    /// Whether it refers to state that a worker keeps.
    pub fn refers(&self) -> bool {
        self.stateful(false).is_some()
    }

    /// The lane whose state on a worker the request continues.
    pub(super) fn owner(&self, registry: &Registry) -> Option<u32> {
        let (field, id) = state(&self.prompt)?;
        let minted = registry.minted.get(minted_key(self.scope, RESPONSE, xxh3_64(id.as_bytes())));
        if let Some(lane) = minted.and_then(|(lane, _)| registry.store.resolve(lane)) {
            return Some(lane);
        }
        // A conversation goes by its own id, too: whoever was answered under it last.
        let id = valid(id).filter(|_| field == "conversation")?;
        let group = format!("{:016x}/{id}", self.scope);
        let lanes = registry.store.lanes(&group).filter(|(_, lane)| lane.committed);
        lanes.max_by_key(|(_, lane)| lane.used).map(|(at, _)| at)
    }

    /// A turn without a lane: it generates nothing.
    pub(super) fn probe(&self, model: Model) -> Turn {
        let layout = self.prompt.layout();
        let mut turn = self.turn(None, layout);
        (turn.input_len, _) = Estimate::starting(model.whole).of(turn.ticket.size, Lies::Apart, &model.line);
        turn.append_len = turn.input_len;
        turn.class = Class::Probe;
        turn.one_shot = true;
        turn.key = None;
        turn.source = None;
        turn.strength = Strength::None;
        turn.parent = None;
        turn
    }

    /// A turn as far as the request alone tells.
    pub(super) fn turn(&self, lane: Option<LaneRef>, layout: &Layout) -> Turn {
        let fields = &self.prompt.fields;
        let size = Size { bytes: layout.bytes(), media: layout.media() };
        Turn {
            session: SessionId::new(format!("{:016x}/~probe", self.scope)),
            key: self.identity.key.as_deref().map(str::to_owned),
            source: self.identity.source.map(str::to_owned),
            strength: self.identity.strength,
            lane: 0,
            how: How::New,
            t: 0,
            class: self.declared.class.unwrap_or(Class::Main),
            parent: self.declared.parent.as_deref().map(str::to_owned),
            reuse_items: 0,
            append_items: layout.items.len(),
            append_bytes: size.bytes,
            chain: layout.chain.clone(),
            shared_blocks: 0,
            input_len: 0,
            append_len: 0,
            max_output: fields.max_output,
            n: fields.n,
            stream: fields.stream,
            include_usage: fields.include_usage,
            model: fields.model.clone().into_owned(),
            api: self.api,
            one_shot: false,
            stateful: None,
            ticket: Ticket { lane, scope: self.scope, layout: None, size, lies: Lies::Apart, against: 0 },
        }
    }

    /// The field by which the request refers to a worker's state.
    pub(super) fn stateful(&self, known: bool) -> Option<Stateful> {
        state(&self.prompt).map(|(field, _)| Stateful { field, known })
    }
}

/// The field by which a prompt leaves out what a worker keeps, and its id. Only the Responses API has such.
fn state<'p>(prompt: &'p Prompt<'_>) -> Option<(&'static str, &'p str)> {
    let ids = &prompt.fields.ids;
    let fields = [("previous_response_id", &ids.previous_response_id), ("conversation", &ids.conversation)];
    let mut sent = fields.into_iter().filter_map(|(field, id)| Some((field, id.as_deref()?)));
    sent.find(|(_, id)| prompt.api == Api::Responses && !id.is_empty())
}

/// The tenant's and model's digest. It stands before the key in every session id, never in what a client sees.
fn scope(headers: Headers<'_>, model: &str) -> u64 {
    xxh3_64_with_seed(model.as_bytes(), credential(headers))
}

/// A digest of the tenant's credential: what registries may be sharded by.
pub fn credential(headers: Headers<'_>) -> u64 {
    let mut hash = Xxh3::new();
    for name in ["authorization", "x-api-key", "api-key"] {
        hash.update(headers.raw(name).unwrap_or_default());
        hash.update(&[0]);
    }
    hash.digest()
}

/// The session id of a group's lane. A key that itself ends in a number always gets one more, so that no two
/// lanes share an id.
pub(super) fn session(group: &str, number: u32) -> SessionId {
    let suffix = group.rsplit_once('.').map(|(_, suffix)| suffix);
    let numbered = suffix.is_some_and(|s| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit()));
    let mut id = group.to_owned();
    if number > 1 || numbered {
        // Writing to a string cannot fail.
        let _ = write!(id, ".{number}");
    }
    SessionId::new(id)
}

/// Keeps tenants, APIs and named conversations apart in the hints.
fn seed(headers: Headers<'_>, api: Api) -> u64 {
    let named = Identity::of(headers, &BodyIds::default());
    let key = named.key.as_deref().unwrap_or_default();
    xxh3_64_with_seed(key.as_bytes(), credential(headers) ^ api as u64)
}

/// Guesses the lane of a body before it is read.
struct Guess<'a, L> {
    registry: &'a L,
    seed: u64,
}

impl<L: Lookup> Prefixes for Guess<'_, L> {
    fn find(&self, array: &[u8]) -> Option<Known> {
        self.registry.lookup(&Samples::of(array, self.seed))
    }
}
