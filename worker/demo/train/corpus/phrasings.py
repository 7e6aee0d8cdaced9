"""How people ask: general phrasings, small slips and system prompts."""

TERM = """What is {t}|What is {t}|What is {t}|What's {t}|What are {t}|What exactly is {t}|Explain {t}|Explain {t}|Please explain {t}|Can you explain {t}|Could you explain {t}|Explain {t} to me|Can you explain {t} to me|Explain {t} in simple words
Explain {t} in one sentence|Explain {t} briefly|Explain {t} like I am five|Explain what {t} is|Explain what {t} means|Explain how {t} works|Tell me about {t}|Tell me about {t}|Tell me more about {t}|Tell me something about {t}|Can you tell me about {t}|Could you tell me what {t} is
Tell me what {t} is|Please tell me what {t} is|Tell me how {t} works|Describe {t}|Please describe {t}|Can you describe {t}|Define {t}|Give me a definition of {t}|Give a short explanation of {t}|How does {t} work|How do {t} work|How does {t} work in Inflight|What does {t} mean|What do you mean by {t}|What is meant by {t}
What do you know about {t}|Do you know what {t} is|Do you know {t}|I want to know about {t}|I would like to know what {t} is|I want to learn about {t}|I'd like to understand {t}|I don't understand {t}|I do not know what {t} is|Help me understand {t}|Teach me about {t}|Teach me {t}
What about {t}|And {t}|And what is {t}|So what is {t}|{t}|{t}|{t}|Why {t}|What is {t} good for|What is {t} for|What is the point of {t}|What is the purpose of {t}|What is the idea of {t}|What is the idea behind {t}|Why do we need {t}|Why is {t} important|Why is {t} useful|Why does {t} matter|What is so good about {t}|Why do you use {t}
What is {t} about|What is {t} all about|Is {t} important|What is {t} in Inflight|What is {t} in an LLM server|Have you heard of {t}|Summarize {t}|Meaning of {t}|Introduction to {t}|What can you tell me about {t}|What's the deal with {t}|What does {t} do|Can you say what {t} is|Give me the basics of {t}|what is {t} used for|who or what is {t}|how would you explain {t}|how would you describe {t}""".replace("\n", "|").split("|")

VERSUS = """What is the difference between {a} and {b}|What's the difference between {a} and {b}|Difference between {a} and {b}|Explain the difference between {a} and {b}|How does {a} differ from {b}|How do {a} and {b} differ|{a} vs {b}|{a} vs. {b}|{a} versus {b}|{a} or {b}|Compare {a} and {b}|Compare {a} with {b}
Is {a} the same as {b}|Are {a} and {b} the same|What is better, {a} or {b}|Is {a} better than {b}|Why {a} instead of {b}|When should I use {a} and when {b}|Explain {a} vs {b}|Explain {a} and {b}|What are {a} and {b}|Tell me the difference between {a} and {b}|What distinguishes {a} from {b}|How is {a} different from {b}|{a} compared to {b}|which one is better, {a} or {b}|tell me about {a} and {b}|what is {a} and what is {b}""".replace("\n", "|").split("|")

BEFORE = ["Hi, ", "Hello, ", "Hello! ", "Hey, ", "Hi! ", "Please, ", "Ok, ", "So, ", "Well, ", "Thanks. ", "Great! ", "One question: ", "Quick question: ", "Question: ", "Sorry, ", "Excuse me, ", "Now ", "And ", "But ", "Just wondering, ", "I was wondering, ", "Good morning! "]
AFTER = [" please", ", please", " exactly", " again", " in short", " briefly", " in one sentence", " in simple words", " for a beginner", ", and why", " really", " thanks", ", thanks", " for me", " in Inflight", " here", " actually", " then", " in detail", ", can you tell me", " to a beginner"]

SYSTEM = """You are a helpful assistant.|You are a helpful assistant.|You are a friendly assistant.|You are a helpful, honest and harmless assistant.|You are the demo model of Inflight.|Answer briefly.|Be concise.|Answer in one sentence.|You are an expert on LLM serving.|You tell stories to children.|You are a storyteller.|Be polite.|Please answer all questions.|You are a pirate.|You are a teacher.|Answer the question of the user.|Use simple words.|You are Inflight.|Always answer in English.|Think step by step.|You are a chat bot.|Be kind and patient.|Respond in plain text.|You are a helpful assistant. Answer the questions of the user truthfully and briefly.|Today is Monday.|You are a customer support agent for a cloud company.|Your name is {p}.|You are {p}, a friendly {p}.|Never mention {p}.|The user's name is {p}.""".replace("\n", "|").split("|")


def slip(rng, text):
    """One small typing error in a word of at least four letters."""
    spots = [i for i in range(1, len(text) - 2) if text[i - 1:i + 3].isalpha()]
    if not spots:
        return text
    i = rng.choice(spots)
    kind = rng.randrange(4)
    if kind == 0:
        return text[:i] + text[i + 1] + text[i] + text[i + 2:]
    if kind == 1:
        return text[:i] + text[i + 1:]
    if kind == 2:
        return text[:i] + text[i] + text[i:]
    return text[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + text[i + 1:]


def vary(rng, text, question=None):
    """Case, punctuation, polite words and slips around a phrasing."""
    if question is None:
        question = text.split(" ")[0].lower().strip(",'s") in ("what", "how", "why", "who", "when", "which", "where", "can", "could", "do", "does", "is", "are", "did", "should", "will", "have", "may", "was")
    words = text.count(" ") + 1
    if words > 2 and rng.random() < 0.10:
        text += rng.choice(AFTER)
    if rng.random() < 0.10:
        before = rng.choice(BEFORE)
        text = before + (text if before.endswith(("! ", ". ")) or text[:2] == "I " else text[0].lower() + text[1:])
    roll = rng.random()
    if roll < 0.35:
        text = text.lower()
    elif roll < 0.38:
        text = text.upper()
    elif roll < 0.85:
        text = text[0].upper() + text[1:]
    if text[-1].isalnum() or text[-1] in "'\")":
        roll = rng.random()
        if question:
            text += "?" if roll < 0.66 else rng.choice(["??", " ?", ".", "?!"]) if roll < 0.72 else ""
        else:
            text += "." if roll < 0.35 else "?" if roll < 0.48 else "!" if roll < 0.55 else "..." if roll < 0.57 else "???" if roll < 0.58 else ""
    if rng.random() < 0.06:
        text = text.replace("What is", "Whats").replace("what is", "whats").replace("what's", "whats").replace("'", "")
    if rng.random() < 0.13:
        text = slip(rng, text)
        if rng.random() < 0.25:
            text = slip(rng, text)
    return text
