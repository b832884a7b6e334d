"""Sample, and get the same text again: a seed for the call, or one per row."""

from specdiff import SpecDiff, load_drafter, load_target

ar, tokenizer = load_target()
sd = SpecDiff(ar, load_drafter(target=ar))
messages = [{"role": "user", "content": "Invent a name for a boat."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
options = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.8, "top_p": 0.95}


def text(rows):
    return tokenizer.batch_decode(rows[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


once = text(sd.generate(**inputs, seed=7, **options))
again = text(sd.generate(**inputs, seed=7, **options))
print(once[0], "| repeated:", once == again)

rows = text(sd.generate(**inputs, num_return_sequences=3, seed=[1, 2, 3], **options))
print("three rows, a seed each:", rows)

# With the coupled rule even the drafter does not matter: the text is plain decoding's text for that seed.
plain = text(SpecDiff(ar, None).generate(**inputs, seed=7, rule="coupled", **options))
coupled = text(sd.generate(**inputs, seed=7, rule="coupled", **options))
print("coupled equals plain decoding with that seed:", coupled == plain)
