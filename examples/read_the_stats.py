"""What a call says about itself: rounds, acceptance, tau, time."""

from specdiff import SpecDiff, load_drafter, load_target

ar, tokenizer = load_target()
sd = SpecDiff(ar, load_drafter(target=ar))
messages = [{"role": "user", "content": "Count from one to twenty in words."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
stats = sd.generate(**inputs, max_new_tokens=64, do_sample=False, return_dict_in_generate=True).stats

print("new tokens            ", stats.new_tokens[0], "ended by", stats.finish_reason[0])
print("target passes         ", stats.rounds, "after the prefill")
print("tau                   ", round(stats.tau, 2), "new tokens per pass")
print("accepted              ", stats.accepted, "of", stats.proposed, "drafted")
print("acceptance by position", [None if rate is None else round(rate, 2) for rate in stats.acceptance_by_position])
print("new tokens per pass   ", stats.emitted[0])
print("seconds               ", {name: round(value, 3) for name, value in stats.seconds.items()})
