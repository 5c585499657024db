//! A request as the engine sees it: its prompt in tokens and blocks, and how long its answer will be.

use std::borrow::Cow;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use crate::core::types::{BlockHash, Tokens};
use crate::prompt::{Api, BYTES_PER_TOKEN, ChainState, assistant_header, canonical, members, read};
use crate::wire::plan::{CONTINUE, Continue};

use super::super::error::NodeError;
use super::check::check;
use super::model::{output_tokens, tokens};
use super::script::{self, Call, Playback};

/// See the module.
#[derive(Debug, Clone)]
pub struct Job {
    /// Which API it came by.
    pub api: Api,
    /// Canonical prompt and assistant header, and what was answered already: four bytes are a token.
    pub text: Vec<u8>,
    /// How much of its end is answer, in bytes.
    pub answered: usize,
    /// Hashes of its whole blocks.
    pub chain: Arc<[BlockHash]>,
    /// Where the chain stands behind `text`.
    pub state: ChainState,
    /// Tokens of the whole answer.
    pub output: Tokens,
    /// Whether the answer ends by itself there, and not by the request's limit.
    pub ends: bool,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
    /// The answer, when the request brings it along.
    pub script: Option<Playback>,
    /// What the answer ends with: the script's calls, or one of the tool the request insists on.
    pub calls: Vec<Call>,
    /// The answer another worker began and this one goes on with.
    pub begun: Option<Continue>,
}

impl Job {
    /// Reads a request body for a node that serves `model`.
    ///
    /// # Errors
    /// 400 for what is wrong with the body, 404 for another model.
    pub fn read(api: Api, body: &[u8], model: &str) -> Result<Self, NodeError> {
        let prompt = read(api, body, &())?;
        check(api, body)?;
        let fields = prompt.fields;
        if fields.model != model {
            // A client's text may be long; the message need not be.
            let asked: String = fields.model.chars().take(100).collect();
            let message = format!("the model `{asked}` does not exist; this worker serves `{model}`");
            let error = NodeError::not_found("model_not_found", message);
            return Err(NodeError { param: Some("model".into()), ..error });
        }
        if fields.n != 1 {
            return Err(NodeError::bad_field("n", "`n` must be 1"));
        }
        if api == Api::Responses && fields.ids.conversation.is_some() {
            let message = "this worker keeps no conversations: send the whole conversation in `input`";
            return Err(NodeError::bad_field("conversation", message));
        }
        let mut text = canonical(api, body)?;
        let layout = &prompt.known.layout;
        let tools = if layout.has_tools() { Tools::read(body) } else { Tools::default() };
        let script = script::step(body, &text, layout, &tools.names);
        let script = script.and_then(|step| Playback::new(api, step));
        text.extend_from_slice(assistant_header(api));
        let (mut state, mut chain) = (ChainState::root(model), Vec::new());
        state.extend(&mut chain, &text);
        let whole = script.as_ref().map_or_else(|| output_tokens(&text, None), |s| tokens(s.bytes().len()));
        let output = whole.min(fields.max_output.unwrap_or(whole)).max(1);
        let job = Self {
            api,
            ends: output == whole,
            output,
            text,
            answered: 0,
            chain: chain.into(),
            state,
            stream: fields.stream,
            include_usage: fields.include_usage,
            calls: script.as_ref().map_or_else(|| tools.insisted().into_iter().collect(), Playback::calls),
            script,
            begun: None,
        };
        match members(body, [CONTINUE]) {
            [Some(begun)] => job.goes_on(begun),
            [None] => Ok(job),
        }
    }

    /// Takes what was answered already behind the prompt: it has to be held, but not said again.
    fn goes_on(mut self, begun: &[u8]) -> Result<Self, NodeError> {
        let bad = |what: &str| NodeError::bad_field(CONTINUE, format!("`{CONTINUE}` {what}"));
        let begun: Continue =
            serde_json::from_slice(begun).map_err(|_| bad("must have `id`, `created` and `text`"))?;
        let held = match &mut self.script {
            Some(script) => script.skip(&begun.text).ok_or_else(|| bad("is no beginning of the script"))?,
            None if begun.text.len().is_multiple_of(BYTES_PER_TOKEN) => begun.text.clone().into_bytes(),
            None => return Err(bad("ends within a token")),
        };
        if tokens(held.len()) > self.output {
            return Err(bad("is longer than the answer"));
        }
        self.text.extend_from_slice(&held);
        let mut chain = self.chain.to_vec();
        self.state.extend(&mut chain, &held);
        (self.chain, self.answered, self.begun) = (chain.into(), held.len(), Some(begun));
        Ok(self)
    }

    /// Length of the prompt in tokens.
    pub fn prompt_tokens(&self) -> Tokens {
        tokens(self.text.len() - self.answered)
    }

    /// Length in tokens of what must be held before the first token: the prompt, and what was answered already.
    pub fn input_tokens(&self) -> Tokens {
        tokens(self.text.len())
    }
}

/// The tools of a request, and which of them it insists on.
#[derive(Default)]
struct Tools {
    names: Vec<String>,
    choice: Option<Value>,
}

impl Tools {
    /// What is not in a known form counts as nothing.
    fn read(body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Body<'a> {
            #[serde(borrow)]
            tools: Vec<Entry<'a>>,
            tool_choice: Option<Value>,
        }
        /// Chat names a tool inside `function`, the other APIs beside its type.
        #[derive(Deserialize)]
        struct Entry<'a> {
            #[serde(borrow)]
            function: Option<Name<'a>>,
            #[serde(borrow)]
            name: Option<Cow<'a, str>>,
        }
        #[derive(Deserialize)]
        struct Name<'a> {
            #[serde(borrow)]
            name: Cow<'a, str>,
        }
        let Ok(body) = serde_json::from_slice::<Body<'_>>(body) else { return Self::default() };
        let names = body.tools.into_iter().filter_map(|tool| tool.function.map(|f| f.name).or(tool.name));
        Self { names: names.map(Cow::into_owned).collect(), choice: body.tool_choice }
    }

    /// `"required"` and `{"type": "any"}` mean the first tool, another object names one.
    fn insisted(&self) -> Option<Call> {
        let choice = self.choice.as_ref()?;
        let any = choice == "required" || choice.pointer("/type").is_some_and(|kind| kind == "any");
        let named = || choice.pointer("/function/name").or_else(|| choice.pointer("/name"))?.as_str();
        let name = if any { self.names.first()?.as_str() } else { named()? };
        Some(Call { name: name.to_owned(), arguments: "{}".into() })
    }
}
