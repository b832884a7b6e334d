"""Wrap a Hugging Face model; generate as before, faster, with the same text."""

from specdiff import SpecDiff, load_drafter, load_target

ar, tokenizer = load_target()  # the offline default; or AutoModelForCausalLM.from_pretrained(...), as you always do
sd = SpecDiff(ar, load_drafter(target=ar))

messages = [{"role": "user", "content": "Name the planets of the solar system."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)

plain = ar.generate(**inputs, max_new_tokens=64, do_sample=False)
fast = sd.generate(**inputs, max_new_tokens=64, do_sample=False)

print(tokenizer.decode(fast[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("same tokens as ar.generate:", fast.tolist() == plain.tolist())
