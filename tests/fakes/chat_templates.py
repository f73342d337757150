"""Chat templates of model families, each with the essential parts of the original.

Those are how messages, tools and calls are written, which variables are read, and how the answer
begins. The rest of the originals (default system messages, checks of roles) is left out.
``demo_model`` is the demo model with one of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from minisgl_backend.config import DEMO_MODEL


def demo_model(
    folder: Path, template: str, marks: tuple[str, ...], *, special: bool = False
) -> Path:
    """The demo model in a folder, with another template and with tokens for its marks.

    They take the places of the vocabulary's last tokens, so their ids have embeddings. Text that is
    spelled like a mark becomes the token, except for ``special`` ones.
    """
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    model = tokenizer["model"]
    for mark in marks:
        last, token_id = max(model["vocab"].items(), key=lambda item: item[1])
        assert "".join(model["merges"].pop()) == last
        del model["vocab"][last]
        tokenizer["added_tokens"].append(
            {
                "id": token_id,
                "content": mark,
                "special": special,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
        )
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return folder


_CHATML_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\nSignatures, in <tools></tools>:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nWrite a call as JSON in <tool_call></tool_call>:\\n<tool_call>\\n' }}
    {{- '{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}"""
_CHATML_CALLS = """
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}"""

QWEN2_5 = f"""{_CHATML_TOOLS}
{{%- for message in messages %}}
    {{%- if message.role == 'tool' %}}
        {{{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}}}
    {{%- else %}}
        {{{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}}}{_CHATML_CALLS}
    {{%- endif %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""

_QWEN3_MESSAGES = f"""{_CHATML_TOOLS}
{{%- for message in messages %}}
    {{%- set content = message.content if message.content is string else '' %}}
    {{%- if message.role == 'assistant' and '</think>' in content %}}
        {{%- set content = content.split('</think>')[-1].lstrip('\\n') %}}
    {{%- endif %}}
    {{{{- '<|im_start|>' + message.role + '\\n' + content }}}}
    {{%- if message.role == 'assistant' %}}{_CHATML_CALLS}
    {{%- endif %}}
    {{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}"""
QWEN3 = f"""{_QWEN3_MESSAGES}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n' }}}}
    {{%- if enable_thinking is defined and enable_thinking is false %}}
        {{{{- '<think>\\n\\n</think>\\n\\n' }}}}
    {{%- endif %}}
{{%- endif %}}"""
QWEN3_THINKING = f"""{_QWEN3_MESSAGES}
{{%- if add_generation_prompt %}}
    {{{{- '<|im_start|>assistant\\n<think>\\n' }}}}
{{%- endif %}}"""
EXAONE_4 = """{%- if tools %}
    {{- '[|system|]\\nTools, each in <tool></tool>:\\n' }}
    {%- for tool in tools %}{{- '<tool>' }}{{- tool | tojson }}{{- '</tool>\\n' }}{%- endfor %}
    {{- 'Reply with <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call>' }}
    {{- '[|endofturn|]\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '[|' + message.role + '|]\\n' }}
    {%- if message.role == 'tool' %}
        {{- '<tool_result>' }}{{- {'result': message.content} | tojson }}{{- '</tool_result>' }}
    {%- else %}
        {%- set content = message.content if message.content is string else '' %}
        {%- if message.role == 'assistant' %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {{- '<think>\\n\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or () %}
            {{- '\\n<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '[|endofturn|]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set thinks = enable_thinking is defined and enable_thinking is true %}
    {{- '[|assistant|]\\n' + ('<think>\\n' if thinks else '<think>\\n\\n</think>\\n\\n') }}
{%- endif %}"""
QWEN3_CODER = """{%- if tools %}
    {{- '<tools>' }}{%- for tool in tools %}{{- tool.function.name }}{%- endfor %}{{- '</tools>' }}
    {{- 'Reply with <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n' }}
    {{- '</function>\\n</tool_call>, whose "arguments" are not JSON' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.content }}
    {%- for call in message.tool_calls or () %}
        {{- '\\n<tool_call>\\n<function=' + call.function.name + '>' }}
        {%- for name, value in call.function.arguments.items() %}
            {%- set is_scalar = value is string or value is not iterable %}
            {{- '\\n<parameter=' + name + '>\\n' }}
            {{- (value | string if is_scalar else value | tojson) + '\\n</parameter>' }}
        {%- endfor %}
        {{- '\\n</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}"""
STEP_3_5 = """{{- bos_token }}
{%- if tools or reasoning_effort is defined %}
    {{- '<|im_start|>system\\n' }}
    {%- if reasoning_effort is defined %}
        {{- 'Reasoning: ' + reasoning_effort + '\\n\\n' }}
    {%- endif %}
    {%- for tool in tools or () %}{{- tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or () %}
        {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"""
GLM_4_5 = """{%- for tool in tools or () %}
    {{- 'Reply with <tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n' }}
    {{- '</tool_call> to call ' + tool.function.name }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- for call in message.tool_calls or () %}
        {{- '\\n<tool_call>' + call.function.name }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
            {{- (value if value is string else value | tojson) + '</arg_value>' }}
        {%- endfor %}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
{%- endfor %}"""
LING_3 = """{%- for tool in tools or () %}
    {{- 'Reply with <tool_call>name\\n<arg_key>key</arg_key>\\n<arg_value>value</arg_value>\\n' }}
    {{- '</tool_call> to call ' + tool.function.name }}
{%- endfor %}
{%- for message in messages %}
    {{- '<role>' + ('HUMAN' if message.role == 'user' else message.role | upper) + '</role>' }}
    {{- message.content }}
    {%- for call in message.tool_calls or () %}
        {{- '\\n<tool_call>' + call.function.name }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
            {{- (value if value is string else value | tojson) + '</arg_value>' }}
        {%- endfor %}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|role_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<role>ASSISTANT</role>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}"""

SEED_OSS = """{%- for tool in tools or () %}
    {{- 'Call ' + tool.function.name + ' so: <seed:tool_call>\\n<function=name>\\n' }}
    {{- '<parameter=key>value</parameter>\\n</function>\\n</seed:tool_call>' }}
{%- endfor %}
{%- for message in messages %}
    {{- '<seed:bos>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or () %}
        {{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments.items() %}
            {{- '<parameter=' + name + '>' }}
            {{- (value if value is string else value | tojson) + '</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</seed:tool_call>' }}
    {%- endfor %}
    {{- '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<seed:bos>assistant\\n' }}
    {%- if thinking_budget == 0 %}{{- '<seed:think>\\n</seed:think>' }}{% endif %}
{%- endif %}"""
MINIMAX_M2 = """{%- for tool in tools or () %}
    {{- 'Call ' + tool.function.name + ' so: <minimax:tool_call>\\n<invoke name="name">\\n' }}
    {{- '<parameter name="key">value</parameter>\\n</invoke>\\n</minimax:tool_call>' }}
{%- endfor %}
{%- for message in messages %}
    {{- ']~b]' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- '\\n<minimax:tool_call>\\n' }}
        {%- for call in message.tool_calls %}
            {{- '<invoke name="' + call.function.name + '">\\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<parameter name="' + name + '">' }}
                {{- (value if value is string else value | tojson) + '</parameter>\\n' }}
            {%- endfor %}
            {{- '</invoke>\\n' }}
        {%- endfor %}
        {{- '</minimax:tool_call>' }}
    {%- endif %}
    {{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{% endif %}"""

NEMOTRON_NANO_2 = """{%- set told = namespace(thinks=true) %}
{%- for message in messages if message.role in ('system', 'user') %}
    {%- if '/no_think' in message.content %}{%- set told.thinks = false %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<SPECIAL_10>System\\nTools: <AVAILABLE_TOOLS>[' }}
    {%- for tool in tools %}{{- tool.function | tojson }}{%- endfor %}
    {{- ']</AVAILABLE_TOOLS>\\nTo call some, write:\\n<TOOLCALL>[{"name": "a name", ' }}
    {{- '"arguments": "its arguments"}]</TOOLCALL>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<SPECIAL_11>User\\n<TOOL_RESPONSE>[' + message.content + ']</TOOL_RESPONSE>\\n' }}
    {%- else %}
        {{- '<SPECIAL_11>' + message.role + '\\n' }}
        {{- (message.content or '').split('</think>')[-1] }}
        {%- if message.tool_calls %}
            {{- '<TOOLCALL>[' }}
            {%- for call in message.tool_calls %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments | tojson }}
                {{- '}' + ('' if loop.last else ', ') }}
            {%- endfor %}
            {{- ']</TOOLCALL>' }}
        {%- endif %}
        {{- '\\n<SPECIAL_12>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<SPECIAL_11>Assistant\\n' + ('<think>\\n' if told.thinks else '<think></think>') }}
{%- endif %}"""
NEMOTRON_3 = f"""{QWEN3_CODER}
{{%- if add_generation_prompt %}}
    {{%- set thinks = enable_thinking if enable_thinking is defined else true %}}
    {{{{- '<|im_start|>assistant\\n' + ('<think>\\n' if thinks else '<think></think>') }}}}
{{%- endif %}}"""

LFM_2 = """{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>system\\nList of tools: <|tool_list_start|>' + (tools | tojson) }}
    {{- '<|tool_list_end|><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'tool' %}
        {%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""The first version, which writes no calls."""
LFM_2_5 = """{{- bos_token }}
{%- if tools %}{{- '<|im_start|>system\\nTools: ' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' + content.split('</think>')[-1] }}
    {%- if message.tool_calls %}
        {{- '<|tool_call_start|>[' }}
        {%- for call in message.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' }}
                {{- "'" + value + "'" if value is string else value | string }}
                {{- '' if loop.last else ', ' }}
            {%- endfor %}
            {{- ')' + ('' if loop.last else ', ') }}
        {%- endfor %}
        {{- ']<|tool_call_end|>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

COMMAND_R7B = """{{- bos_token }}
{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble\\n' }}
{%- if tools %}
    {{- 'Write a plan between <|START_THINKING|> and <|END_THINKING|>, then ' }}
    {{- '<|START_ACTION|>, a list of calls, and <|END_ACTION|>. At last write an answer between ' }}
    {{- '<|START_RESPONSE|> and <|END_RESPONSE|>.\\n' }}
    {%- for tool in tools %}
        {{- '{"name": "' + tool.function.name + '", "description": "' }}
        {{- tool.function.description + '", "parameters": ' }}
        {{- tool.function.parameters | tojson }}{{- '}\\n' }}
    {%- endfor %}
{%- endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- set called = namespace(count=0) %}
{%- for message in messages %}
    {{- '<|START_OF_TURN_TOKEN|>' }}
    {%- if message.role == 'tool' %}
        {{- '<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>[{"results": {"0": ' }}
        {{- message.content | tojson }}{{- '}}]<|END_TOOL_RESULT|>' }}
    {%- elif message.role != 'assistant' %}
        {{- '<|' + message.role | upper + '_TOKEN|>' + message.content }}
    {%- elif message.tool_calls %}
        {{- '<|CHATBOT_TOKEN|><|START_THINKING|>' + message.tool_plan + '<|END_THINKING|>' }}
        {{- '<|START_ACTION|>[\\n' }}
        {%- for call in message.tool_calls %}
            {{- '    {"tool_call_id": "' + called.count | string + '", "tool_name": "' }}
            {{- call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{- '}' + ('' if loop.last else ',') + '\\n' }}
            {%- set called.count = called.count + 1 %}
        {%- endfor %}
        {{- ']<|END_ACTION|>' }}
    {%- else %}
        {{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}
    {%- endif %}
    {{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"""
COMMAND_A_REASONING = f"""{COMMAND_R7B}
{{%- if add_generation_prompt %}}
    {{%- set thinks = reasoning if reasoning is defined else true %}}
    {{{{- '<|START_THINKING|>' + ('' if thinks else '<|END_THINKING|>') }}}}
{{%- endif %}}"""

DEEPSEEK_R1_DISTILL = """{% if not add_generation_prompt is defined %}
{% set add_generation_prompt = false %}{% endif %}{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {{- '<｜tool▁calls▁begin｜>' + message['tool_calls'][0]['function']['name'] }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<｜Assistant｜>' + message['content'].split('</think>')[-1] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
DEEPSEEK_R1_DISTILL_FIRST = DEEPSEEK_R1_DISTILL.replace("<think>\\n", "")
"""The first version: the model writes the mark itself."""

LLAMA_3 = """{% for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] }}
{{- '<|eot_id|>' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
LLAMA_3_2 = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + date_string + '<|eot_id|>' }}
{%- if tools_in_user_message and not tools is none %}
    {{- 'Call as {"name": the name, "parameters": an object of values}. ' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('one call only') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}{{- '}' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
LLAMA_3_1 = f"""{{%- if builtin_tools is defined %}}
    {{%- for message in messages %}}
        {{%- if message.tool_calls and message.tool_calls[0].function.name in builtin_tools %}}
            {{{{- '<|python_tag|>' + message.tool_calls[0].function.name + '.call(' }}}}
        {{%- endif %}}
    {{%- endfor %}}
{{%- endif %}}
{LLAMA_3_2}"""
LLAMA_3_3 = LLAMA_3_1

GEMMA_4_SMALL = """{%- macro written(value) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}
        {{- '{' -}}
        {%- for name, inner in value | dictsort -%}
            {{- name + ':' -}}{{- written(inner) -}}{%- if not loop.last %},{% endif -%}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif value is sequence -%}
        {{- '[' -}}
        {%- for inner in value -%}
            {{- written(inner) -}}{%- if not loop.last %},{% endif -%}
        {%- endfor -%}
        {{- ']' -}}
    {%- else -%}{{- value -}}
    {%- endif -%}
{%- endmacro -%}
{{- bos_token }}
{%- if enable_thinking is defined and enable_thinking or tools %}
    {{- '<|turn>system\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<|think|>\\n' }}{%- endif %}
    {%- for tool in tools %}
        {{- '<|tool>declaration:' + tool.function.name + '{}<tool|>' }}
    {%- endfor %}
    {{- '<turn|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.previtem is not defined or message.role != loop.previtem.role %}
        {{- '<|turn>' + message.role + '\\n' }}
    {%- endif %}
    {%- if message.reasoning_content and message.tool_calls %}
        {{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' }}
    {%- endif %}
    {%- for call in message.tool_calls %}
        {{- '<|tool_call>call:' + call.function.name }}
        {{- written(call.function.arguments) + '<tool_call|>' }}
    {%- endfor %}
    {%- for result in message.tool_responses %}
        {{- '<|tool_response>response:' + result.name + '{value:' }}
        {{- written(result.response) + '}<tool_response|>' }}
    {%- endfor %}
    {%- if message.content or not message.tool_calls %}
        {{- message.content.split('<channel|>')[-1] + '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not messages[-1].tool_responses %}
    {{- '<|turn>model\\n' }}
{%- endif %}"""
GEMMA_4 = f"""{GEMMA_4_SMALL}
{{%- if add_generation_prompt and not (enable_thinking is defined and enable_thinking) %}}
    {{{{- '<|channel>thought\\n<channel|>' }}}}
{{%- endif %}}"""

MISTRAL_V3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- ', "id": "' + call.id + '"}' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
    {%- else %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_V13 = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is defined and tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_V11 = MISTRAL_V13.replace("'[ARGS]'", "'[CALL_ID]' + call.id + '[ARGS]'")
MAGISTRAL = f"""{{%- if messages[0].role != 'system' %}}
    {{{{- '[SYSTEM_PROMPT]Draft your thoughts first:[THINK]Your thoughts[/THINK]' }}}}
    {{{{- 'Then answer.[/SYSTEM_PROMPT]' }}}}
{{%- endif %}}
{MISTRAL_V13}"""
MAGISTRAL_FIRST = MAGISTRAL.replace("[THINK]", "<think>").replace("[/THINK]", "</think>")
"""The first version: the marks are plain text."""
MISTRAL_WITH_EFFORT = f"""{{%- if reasoning_effort is not defined or reasoning_effort is none %}}
    {{%- set reasoning_effort = 'none' %}}
{{%- endif %}}
{{{{- '[MODEL_SETTINGS]{{"reasoning_effort": "' + reasoning_effort + '"}}[/MODEL_SETTINGS]' }}}}
{MAGISTRAL}"""

HERMES_3 = """{{- bos_token }}{% for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HERMES_3_TOOL_USE = """{%- macro type_of(property) -%}
    {{- property.type if property.type != "object" else "dict" }}
{%- endmacro -%}
{{- bos_token + '<|im_start|>system\\nSignatures, in <tools></tools>: <tools>' }}
{%- for tool in tools %}
    {{- '{"name": "' + tool.function.name + '", "parameters": ' }}
    {{- type_of(tool.function.parameters) + '}' }}
{%- endfor %}
{{- '</tools> Write a call as <tool_call>\\n{"arguments": <dict>, "name": <name>}\\n' }}
{{- '</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

GPT_OSS = """{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' %}
{{- '<|start|>system<|message|>Knowledge cutoff: 2024-06\\n\\nReasoning: ' + effort }}
{{- '\\n\\n# Valid channels: analysis, commentary, final.' }}
{%- if tools %}
    {{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}
{%- endif %}
{{- '<|end|>' }}
{%- set told = messages[0].role in ('system', 'developer') %}
{%- if told or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if told %}{{- '# Instructions\\n\\n' + messages[0].content + '\\n\\n' }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\\n\\nnamespace functions {\\n' }}
        {%- for tool in tools %}
            {{- '// ' + tool.function.description + '\\n' }}
            {{- 'type ' + tool.function.name + ' = (' }}
            {%- if tool.function.parameters and tool.function.parameters.properties %}
                {{- '_: ' }}{{- tool.function.parameters | tojson }}
            {%- endif %}
            {{- ') => any;\\n' }}
        {%- endfor %}
        {{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(call=none) %}
{%- for message in (messages[1:] if told else messages) %}
    {%- if message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {%- if last.call is none %}{{- raise_exception('a result without a call') }}{%- endif %}
        {{- '<|start|>functions.' + last.call + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{- '<|end|>' }}
    {%- elif message.tool_calls %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('content and thinking beside a call') }}
        {%- endif %}
        {%- if message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set last.call = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + last.call + '<|channel|>commentary json' }}
        {{- '<|message|>' }}{{- message.tool_calls[0].function.arguments | tojson }}
        {{- '<|call|>' }}
    {%- else %}
        {%- set last.call = none %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
GPT_OSS_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)
"""The tokens of gpt-oss."""
