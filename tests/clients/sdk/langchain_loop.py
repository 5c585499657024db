"""Two turns with a tool each, by LangChain's agents over its OpenAI and Anthropic models."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from common import PROMPT, SECOND, Tools

model = sys.argv[1]
models = {
    "chat": ChatOpenAI(model=model, max_retries=0),
    "responses": ChatOpenAI(model=model, max_retries=0, use_responses_api=True, store=False),
    "messages": ChatAnthropic(model=model, max_retries=0, max_tokens=2000),
}

for name, chosen in models.items():
    tools = Tools()

    @tool
    def look(path: str) -> str:
        """Look at a file."""
        return tools.run("look", {"path": path})

    agent = create_agent(chosen, [look], system_prompt=f"You are {name}.")
    state, texts = {"messages": []}, []
    for ask in (PROMPT, SECOND):
        state["messages"].append({"role": "user", "content": ask})
        state = agent.invoke(state)
        texts.append(state["messages"][-1].text)
    tools.check(texts)
