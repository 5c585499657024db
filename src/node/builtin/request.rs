//! A request as the engine sees it: its prompt in tokens and blocks, and how long its answer will be.

use std::borrow::Cow;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use crate::core::types::{BlockHash, Tokens};
use crate::prompt::{Api, ChainState, assistant_header, canonical, read};

use super::super::error::NodeError;
use super::model::{output_tokens, tokens};

/// See the module.
#[derive(Debug, Clone)]
pub struct Job {
    /// Which API it came by.
    pub api: Api,
    /// Canonical prompt and assistant header: four bytes are a token.
    pub text: Vec<u8>,
    /// Hashes of its whole blocks.
    pub chain: Arc<[BlockHash]>,
    /// Where the chain stands behind `text`.
    pub state: ChainState,
    /// Tokens of the answer.
    pub output: Tokens,
    /// Whether the answer ends by itself there, and not by the request's limit.
    pub ends: bool,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether a stream ends with the usage.
    pub include_usage: bool,
    /// The tool the request insists on; the answer then ends with a call of it.
    pub tool: Option<String>,
}

impl Job {
    /// Reads a request body for a node that serves `model`.
    ///
    /// # Errors
    /// 400 for what is wrong with the body, 404 for another model.
    pub fn read(api: Api, body: &[u8], model: &str) -> Result<Self, NodeError> {
        let bad = |e: crate::prompt::BadBody| NodeError::bad_request(e.to_string());
        let prompt = read(api, body, &()).map_err(bad)?;
        let fields = prompt.fields;
        if fields.model != model {
            let message = format!("this worker serves `{model}`, not `{}`", fields.model);
            return Err(NodeError::not_found("model_not_found", message));
        }
        if fields.n != 1 {
            return Err(NodeError::bad_request("`n` must be 1"));
        }
        let mut text = canonical(api, body).map_err(bad)?;
        text.extend_from_slice(assistant_header(api));
        let (mut state, mut chain) = (ChainState::root(model), Vec::new());
        state.extend(&mut chain, &text);
        let output = output_tokens(&text, fields.max_output);
        Ok(Self {
            api,
            ends: output == output_tokens(&text, None),
            output,
            text,
            chain: chain.into(),
            state,
            stream: fields.stream,
            include_usage: fields.include_usage,
            tool: if prompt.known.layout.has_tools() { insisted_tool(body) } else { None },
        })
    }

    /// Length of the prompt in tokens.
    pub fn prompt_tokens(&self) -> Tokens {
        tokens(self.text.len())
    }
}

#[derive(Deserialize)]
struct ToolBody<'a> {
    #[serde(borrow)]
    tools: Vec<ToolEntry<'a>>,
    tool_choice: Option<Value>,
}

#[derive(Deserialize)]
struct ToolEntry<'a> {
    #[serde(borrow)]
    function: Option<ToolName<'a>>,
}

#[derive(Deserialize)]
struct ToolName<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
}

/// `tool_choice`: `"required"` means the first tool, an object names one. What is not in that form asks for none.
fn insisted_tool(body: &[u8]) -> Option<String> {
    let body: ToolBody<'_> = serde_json::from_slice(body).ok()?;
    match body.tool_choice? {
        Value::String(choice) if choice == "required" => {
            body.tools.into_iter().find_map(|tool| tool.function).map(|tool| tool.name.into_owned())
        }
        choice => choice.pointer("/function/name").and_then(Value::as_str).map(str::to_owned),
    }
}
