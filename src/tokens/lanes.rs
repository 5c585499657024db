//! Exact counts of turns: what a lane's prompts share, in tokens.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;
use serde::Deserialize;
use serde_json::Value;

use super::template::Template;
use super::text::Text;
use super::tokenizer::Tokenizer;
use crate::core::types::{BlockHash, SessionId, Tokens};
use crate::prompt::BLOCK_TOKENS;

/// Lanes remembered at most; then the older half goes.
const LANES: usize = 8192;

/// Counts prompts exactly. Shared by all serving threads.
#[derive(Debug)]
pub struct Exact {
    tokenizer: Tokenizer,
    template: Template,
    lanes: Mutex<Lanes>,
}

#[derive(Debug, Default)]
struct Lanes {
    known: HashMap<SessionId, Lane>,
    clock: u64,
}

#[derive(Debug, Default)]
struct Lane {
    used: u64,
    seen: Option<Arc<Text>>,
    /// The prompt of the last success and the tokens of its answer.
    committed: Option<(Arc<Text>, Tokens)>,
    /// Whether the engine found the last answer again in the prompt behind it.
    echoes: bool,
}

/// A prompt, counted.
#[derive(Debug, Clone)]
pub struct Counted {
    /// `H`: the hashes of its whole blocks of token ids.
    pub chain: Arc<[BlockHash]>,
    /// Its length.
    pub input_len: Tokens,
    /// What prompt plus answer of the lane's last success do not hold, in whole blocks.
    pub append_len: Tokens,
    text: Arc<Text>,
}

impl Exact {
    /// Reads a `tokenizer.json`, and the template from `template` or, without one, from the
    /// `tokenizer_config.json` beside it.
    ///
    /// # Errors
    /// A sentence that names the file.
    pub fn load(tokenizer: &Path, template: Option<&Path>) -> Result<Self, String> {
        let read =
            |path: &Path| std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()));
        let beside = tokenizer.with_file_name("tokenizer_config.json");
        let config: Config = match read(&beside) {
            Ok(text) => serde_json::from_str(&text).map_err(|e| format!("{}: {e}", beside.display()))?,
            Err(_) if template.is_some() => Config::default(),
            Err(missing) => return Err(missing),
        };
        let (source, from) = match (template, &config.chat_template) {
            (Some(path), _) => (read(path)?, path.to_owned()),
            (None, Some(Value::String(source))) => (source.clone(), beside),
            (None, _) => return Err(format!("{}: no `chat_template` that is a text", beside.display())),
        };
        let template = Template::new(source, token(&config.bos_token), token(&config.eos_token));
        let template = template.map_err(|e| format!("{}: {e}", from.display()))?;
        Ok(Self { tokenizer: Tokenizer::from_file(tokenizer)?, template, lanes: Mutex::default() })
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        // Each change is whole before the next begins.
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a chat body on its lane (`None` = nobody's). `None` when it has no text of its own: media, or a body
    /// the template refuses; its bytes are counted then.
    pub fn count(&self, lane: Option<&SessionId>, model: &str, chat: &[u8]) -> Option<Counted> {
        let text = self
            .template
            .render(chat)
            .inspect_err(|why| tracing::debug!(%why, "not counted exactly"))
            .ok()?;
        let before = lane.and_then(|lane| self.lanes().get(lane)?.seen.clone());
        let text = Text::of(&self.tokenizer, model, &text, before.as_deref());
        let text =
            Arc::new(text.inspect_err(|why| tracing::warn!(why, "a prompt cannot be tokenised")).ok()?);
        let mut held = 0;
        if let Some(lane) = lane {
            let mut lanes = self.lanes();
            let lane = lanes.open(lane);
            lane.seen = Some(text.clone());
            held = lane.held(&text);
        }
        let input_len = text.end.tokens();
        Some(Counted {
            chain: text.hashes.clone(),
            input_len,
            append_len: input_len - held.min(input_len),
            text,
        })
    }

    /// Learns from a turn that was answered.
    pub fn commit(
        &self,
        lane: &SessionId,
        counted: &Counted,
        completion: Option<Tokens>,
        cached: Option<Tokens>,
    ) {
        let mut lanes = self.lanes();
        let lane = lanes.open(lane);
        if let (Some((before, output)), Some(cached)) = (&lane.committed, cached) {
            lane.learn(before.end.tokens(), *output, cached, &counted.text);
        }
        lane.committed = Some((counted.text.clone(), completion.unwrap_or(0)));
    }

    /// Bytes of the prompt that had to be tokenised for a count.
    #[cfg(test)]
    pub(super) fn read(counted: &Counted) -> usize {
        counted.text.read
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The template.
    pub fn template(&self) -> &Template {
        &self.template
    }
}

impl Lanes {
    fn get(&self, lane: &SessionId) -> Option<&Lane> {
        self.known.get(lane)
    }

    fn open(&mut self, lane: &SessionId) -> &mut Lane {
        self.clock += 1;
        if self.known.len() >= LANES && !self.known.contains_key(lane) {
            let oldest = self.clock.saturating_sub(LANES as u64 / 2);
            self.known.retain(|_, lane| lane.used > oldest);
        }
        let used = self.clock;
        let lane = self.known.entry(lane.clone()).or_insert_with(|| Lane { echoes: true, ..Lane::default() });
        lane.used = used;
        lane
    }
}

impl Lane {
    /// Tokens of a prompt that the last prompt and its answer hold, in whole blocks.
    fn held(&self, text: &Text) -> Tokens {
        let Some((before, output)) = &self.committed else { return 0 };
        let shared = before.common(text);
        let prompt = before.end.tokens();
        let grew = text.end.tokens().saturating_sub(prompt);
        // The last prompt whole, or all but what its last tokens and the answer's first became.
        let whole = shared == before.hashes.len();
        match whole && self.echoes && grew >= *output {
            true => blocks(prompt + output),
            false => (shared * BLOCK_TOKENS) as Tokens,
        }
    }

    /// `cached_tokens` tells whether the last answer was found again; less than the prompt is lost residency.
    fn learn(&mut self, prompt: Tokens, output: Tokens, cached: Tokens, text: &Text) {
        let block = BLOCK_TOKENS as Tokens;
        let extends =
            self.committed.as_ref().is_some_and(|(before, _)| before.common(text) == before.hashes.len());
        if extends && output >= 2 * block && cached + block >= prompt {
            self.echoes = cached >= prompt + output / 2;
        }
    }
}

/// Rounded down to whole blocks.
const fn blocks(tokens: Tokens) -> Tokens {
    tokens - tokens % BLOCK_TOKENS as Tokens
}

/// What of a `tokenizer_config.json` matters here.
#[derive(Debug, Default, Deserialize)]
struct Config {
    chat_template: Option<Value>,
    bos_token: Option<Value>,
    eos_token: Option<Value>,
}

/// A token, which is a text or an object that has one.
fn token(value: &Option<Value>) -> Option<&str> {
    let value = value.as_ref()?;
    value.as_str().or_else(|| value.get("content")?.as_str())
}
