"""Several prompts at once: pad on the left; every row drafts, accepts and ends by itself."""

from specdiff import SpecDiff, load_drafter, load_target

ar, tokenizer = load_target()  # this tokenizer pads on the left already
sd = SpecDiff(ar, load_drafter(target=ar))

questions = ["What is 12 times 7?", "Name three colours.", "Which animal says meow? Answer in one word."]
chats = [[{"role": "user", "content": question}] for question in questions]
inputs = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
)
out = sd.generate(**inputs, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)

width = inputs["input_ids"].shape[1]
for row, question in enumerate(questions):
    new, reason = out.stats.new_tokens[row], out.stats.finish_reason[row]
    answer = tokenizer.decode(out.sequences[row, width : width + new], skip_special_tokens=True)
    print(f"{question}\n  {answer!r} ({new} tokens, {reason})")
