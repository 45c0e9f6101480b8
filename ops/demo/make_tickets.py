"""Write the sample tickets: `python -m ops.demo.make_tickets`. Seeded, so the same file every time.

Every situation is told in two ways; names, numbers and the sentences around it vary. Knows nothing of labelling.
"""

import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

NUM_TICKETS = 360
PATH = Path(__file__).with_name("tickets.parquet")
SHARES = {"billing": 0.38, "bug": 0.37, "other": 0.25}

# fmt: off
SITUATIONS: dict[str, list[tuple[str, str, str]]] = {
    "billing": [
        ("Charged twice", "My card was charged twice for {month}: two payments of {amount} on the same day.",
         "The bank statement shows {amount} from you two times, but we have a single account. Please refund one."),
        ("Refund not received", "You confirmed a refund of {amount} on {date}. It still has not arrived in my account.",
         "Where is my refund? I was promised {amount} three weeks ago and the bank sees nothing incoming."),
        ("Wrong VAT on invoice", "Invoice {invoice} shows VAT although we gave you our EU VAT number. Please correct it.",
         "Our accountant rejected invoice {invoice} because the tax rate on it is wrong for our country."),
        ("Need invoice copies", "Could you send me all invoices from {month}? The finance team needs them for the audit.",
         "I need a receipt for the payment of {amount} made on {date}; the e-mail with it never reached me."),
        ("Switch to yearly payment", "We pay monthly and would like to pay yearly instead. What would {seats} seats cost?",
         "Is there a discount if we pay for the whole year up front? We have {seats} people on the {plan} plan."),
        ("Card declined", "Our new company card is declined when I enter it as payment method, but it works elsewhere.",
         "The renewal failed because the card on file expired in {month}. How do I pay the open {amount}?"),
        ("Cancel subscription", "Please cancel our subscription at the end of {month} and confirm that we will not be billed.",
         "I cancelled the {plan} plan on {date} and was billed {amount} again yesterday. Stop charging me."),
        ("Price increase", "My renewal quote went from {amount} to nearly double. Nobody told us about a new price.",
         "Why is the {plan} plan more expensive than the price on your website? I expected {amount}."),
        ("Billing address", "We moved offices. The address on the invoices has to change before the next one goes out.",
         "Please put our legal name and the purchase order number {order} on invoice {invoice}."),
        ("Unused seats", "We are paying for {seats} seats and use half of them. Can the difference be credited?",
         "Two people left in {month} and their licences are still on the bill. Please take them off and credit us."),
        ("Unknown charge", "There is a charge of {amount} on {date} that I cannot match with any order of ours.",
         "What is the item 'usage overage' for {amount} on my last bill? We never went over a limit."),
        ("Pay by bank transfer", "Our company does not use credit cards. Can we pay by bank transfer and get 30 days?",
         "Accounts payable needs your IBAN and a signed form before they can transfer the {amount}."),
        ("Trial turned into a payment", "I only wanted the trial and now {amount} has been taken from my card.",
         "The free trial was supposed to last until {date}, yet the first payment has already gone through."),
        ("Discount code", "The code SPRING{num} from your newsletter is not taken off at checkout, full price is shown.",
         "We were offered 20% off for the first year, but the invoice of {amount} is without the discount."),
        ("Non-profit pricing", "We are a registered charity with {seats} volunteers. Is there a reduced price for us?",
         "Do you have an education rate? A school cannot afford {amount} a month."),
        ("Downgrade", "Please move us from the {plan} plan to a cheaper one from {month} on.",
         "If I downgrade today, do I get back the rest of what I paid for this year?"),
        ("Currency", "We are billed in dollars and would like euros: the exchange fees cost us a lot each month.",
         "Why did the currency of my invoice change in {month}? Accounting can only book euros."),
        ("Payment reminder by mistake", "I got a reminder for invoice {invoice}, but it was paid on {date}. See the attached slip.",
         "Your system says our account is overdue by {amount}. The transfer left our bank on {date}."),
        ("Upgrade cost", "What exactly will I be charged today if I upgrade to the {plan} plan in the middle of the month?",
         "Before I add {seats} seats I need to know what they cost per month, including tax."),
        ("Split invoice", "Can our two departments get separate invoices? One bill for {seats} people is a pain to divide.",
         "Please issue one invoice per cost centre from {month}; finance will not accept a combined one."),
    ],
    "bug": [
        ("Export fails", "Exporting the {area} to CSV stops at {num} percent with 'unexpected error'. It worked last week.",
         "The CSV that I download from the {area} is empty: only the header line, no rows."),
        ("Cannot log in", "After I enter the code from my phone the login page just loads again. Same in another browser.",
         "Since {date} nobody in our team can sign in: the page answers with error 502."),
        ("App crashes", "The {platform} app closes by itself as soon as I open the {area}. Reinstalling did not help.",
         "Crash on start on {platform}, version 4.{num}. The screen flashes white and then it is gone."),
        ("Wrong totals", "The total in the {area} says {num} but the rows add up to a different number.",
         "Numbers in the chart and in the table below it do not match; the chart is missing a whole day."),
        ("Blank page", "The {area} stays blank. The browser console shows 'undefined is not a function'.",
         "When I click on {area} I get a white screen. Clearing the cache changes nothing."),
        ("Slow since the update", "Since the update of {date} every click in the {area} takes {num} seconds.",
         "Opening a record hangs so long that the browser offers to kill the tab. It was quick before."),
        ("Upload broken", "Uploading a PDF fails at the very end with 'file type not allowed', although PDFs are listed.",
         "Any attachment over 5 MB vanishes: the progress bar finishes and then the file is not there."),
        ("Duplicate notifications", "I get every notification three times, by e-mail and on the phone.",
         "One comment produced {num} identical e-mails to everyone in the project. Please make it stop."),
        ("Search finds nothing", "Search returns no result for words with an accent, for example 'café' or 'Zoë'.",
         "Searching for a ticket number that I can see on the screen says 'no matches'."),
        ("Dates are off", "All dates in the {area} are one day early for our colleagues in Tokyo.",
         "A meeting set for 9:00 appears at 10:00 since the clocks changed. Our time zone is set correctly."),
        ("Sync stopped", "The calendar sync has been stuck on 'in progress' since {date}. Nothing new comes in.",
         "Changes made on {platform} do not show up on the web until I log out and in again."),
        ("Save button", "The save button in the {area} does nothing. No error, the form just stays open.",
         "I press save, it says 'saved', and after a reload my text is gone. I lost an hour of work."),
        ("API returns 500", "Your API answers 500 for every request to /v2/items since {date}; the payload did not change.",
         "Webhooks from you arrive with an empty body. Our integration fails on each of them."),
        ("Printing", "Printing the {area} cuts off the right half of the page, in all browsers.",
         "The PDF report overlaps text and pictures on page {num}; it cannot be read."),
        ("Permission glitch", "A user with read-only rights was able to delete an entry in the {area}. That cannot be right.",
         "Admins see 'access denied' on their own {area}. It started after the last release."),
        ("Import mangles text", "Umlauts turn into question marks when I import a spreadsheet.",
         "The importer puts the first name into the company column and skips every {num}th row."),
        ("Dark mode", "In dark mode the text in the {area} is black on black on {platform}.",
         "The menu covers the buttons on a small screen, so I cannot reach 'submit'."),
        ("Password reset", "The link in the password reset mail says 'expired' the moment I click on it.",
         "The reset mail never comes, I tried {num} times; other mails from you do arrive."),
        ("Offline edits lost", "I edited notes on a flight with {platform}; when the phone was online again they were gone.",
         "The app says 'conflict' for each record and keeps the older version. My changes are lost."),
        ("Error code", "Error E-{num}42 pops up whenever I open the {area}. What does not work there?",
         "The dashboard shows 'something went wrong, try again' in a loop, on three computers."),
    ],
    "other": [
        ("Feature request", "It would be great if the {area} could be sorted by owner. Is something like that planned?",
         "Have you thought of keyboard shortcuts for the {area}? It would save us a lot of clicking."),
        ("How do I invite people", "How can I add {num} colleagues at once? I only see a form for a single address.",
         "Where do I find the setting to give an external partner access to one project only?"),
        ("Data protection", "Where is our data stored, and do you sign a data processing agreement?",
         "Please delete all personal data that you hold about me, as the law gives me the right to ask."),
        ("Security questionnaire", "Our security team has {num} questions about encryption and backups. Who can answer them?",
         "Do you have a SOC 2 report that I can show to our IT department?"),
        ("Thank you", "Just wanted to say that {name} from your team was wonderful yesterday. Problem solved!",
         "We have used your product for a year now and everybody likes it. Keep going."),
        ("Training", "Do you offer a workshop for new users? We would have {num} people in {month}.",
         "Is there a video course or a good manual for beginners? I am new to this."),
        ("Partnership", "We build websites for small shops and would like to recommend you. Do you have partners?",
         "I am writing an article about tools like yours. May I talk with someone about your history?"),
        ("Jobs", "Are you hiring support people in {city}? I could start in {month}.",
         "I applied as an engineer on {date} and have not heard back. Is the position still open?"),
        ("Change e-mail address", "I got married and my e-mail address changes. How do I update my profile?",
         "Please change the owner of our workspace from me to {name}, who takes over my work."),
        ("Newsletter", "Please take me off the newsletter, I get it twice a week.",
         "I would like to get your product news by e-mail again; I unsubscribed by mistake."),
        ("Integration question", "Does it work together with our calendar and chat tools? I did not find a list.",
         "Can I connect a spreadsheet that refreshes itself each night? What do I need for that?"),
        ("Languages", "Will there be a {language} version? Half of our team does not read English well.",
         "In which languages does your support answer? My colleagues speak {language}."),
        ("Event", "Will you be at the fair in {city} in {month}? We would like to meet.",
         "Could one of you give a talk at our meetup in {city}? We are about {num} people."),
        ("Accessibility", "One of our editors is blind. How well does the {area} work with a screen reader?",
         "Do you follow an accessibility standard? The city council asks us for a statement."),
        ("Roadmap", "What is coming in the next release? I would like to plan our rollout.",
         "You spoke about a beta for the new {area}. Can our team take part?"),
        ("Merge workspaces", "We merged with another company and have two workspaces now. How do we put them together?",
         "Is it possible to keep an archive of a project that nobody may change any more?"),
    ],
}

OPENINGS = ["", "", "", "", "Hi,", "Hello,", "Hi there,", "Good morning,", "Dear support team,", "Hey folks,", "Hello again,"]
CONTEXTS = [
    "", "", "", "", "", "I am writing on behalf of {company}.", "We are {company}, customers since 2021.",
    "My manager asks me about it every day.", "I looked in the help centre first, without luck.",
    "We are on the {plan} plan.", "Sorry if this is the wrong place to ask.", "This is my second message about it.",
    "There are {seats} of us here.", "I am not a technical person.", "Your colleague {name} told me to write to you.",
]
CLOSINGS = [
    "", "", "", "", "Thanks!", "Thank you, {name}", "Best regards, {name}", "Please get back to me by Friday.",
    "Any help is welcome.", "Looking forward to your answer.", "Cheers, {name}", "It is rather urgent.", "Sent from my phone",
]
SLOTS = {
    "amount": ["$19.00", "$49.90", "$240", "€99", "€1,188.00", "£35.50", "$612.40", "CHF 75"],
    "month": ["January", "March", "April", "June", "August", "October", "December"],
    "date": ["2 March", "the 11th", "14 May", "last Tuesday", "30 June", "the 3rd", "9 October"],
    "invoice": ["2024-0117", "INV-88213", "#40551", "A-3390", "2024-0902"],
    "order": ["4500-771", "PO 2291", "7714", "PO-11-08"],
    "seats": ["4", "9", "12", "25", "60", "140"],
    "num": ["3", "7", "12", "18", "31", "64", "87"],
    "plan": ["Starter", "Team", "Business", "Enterprise"],
    "area": ["dashboard", "contact list", "monthly report", "task board", "time sheet", "file browser", "admin console"],
    "platform": ["Android", "iPhone", "Windows", "Mac", "iPad"],
    "company": ["Globex", "Hooli", "Initech", "Soylent", "Umbrella Foods", "Wonka & Co", "Stark Tiles", "Acme Rentals"],
    "name": ["Ana", "Björn", "Chidi", "Dana", "Elif", "Farid", "Grace", "Hiro", "Ivana", "Jamal"],
    "city": ["Berlin", "Lisbon", "Toronto", "Nairobi", "Osaka", "Lyon"],
    "language": ["French", "Polish", "Japanese", "Portuguese", "Turkish"],
}
# fmt: on


def make_tickets(num_tickets: int, seed: int = 7) -> pa.Table:
    """Make ``num_tickets`` different tickets in a seeded order, with their route as gold."""
    rng = random.Random(seed)
    stories = {route: _stories(rng, situations) for route, situations in SITUATIONS.items()}
    routes = rng.choices(list(SHARES), weights=list(SHARES.values()), k=num_tickets)
    created = datetime(2024, 5, 6, 6, 0)
    rows = []
    seen: set[str] = set()
    for index, route in enumerate(routes):
        slots = {name: rng.choice(values) for name, values in SLOTS.items()}
        text = subject = ""
        while not text or text in seen:
            subject, story = next(stories[route])
            text = _write(rng, story, slots)
        seen.add(text)
        created += timedelta(minutes=rng.randint(1, 45), seconds=rng.randint(0, 59))
        rows.append(
            {
                "id": 10_001 + index,
                "created": created,
                "customer": slots["company"],
                "plan": slots["plan"],
                "subject": subject,
                "text": text,
                "route": route,
            }
        )
    return pa.Table.from_pylist(rows, schema=_SCHEMA)


_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("created", pa.timestamp("ms", tz="UTC")),
        ("customer", pa.string()),
        ("plan", pa.string()),
        ("subject", pa.string()),
        ("text", pa.string()),
        ("route", pa.string()),
    ]
)


def _stories(rng: random.Random, situations: list[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """Yield (subject, story) for ever, every telling of every situation once before any comes again."""
    tellings = [(subject, story) for subject, *stories in situations for story in stories]
    while True:
        yield from rng.sample(tellings, k=len(tellings))


def _write(rng: random.Random, story: str, slots: dict[str, str]) -> str:
    context = rng.choice(CONTEXTS)
    body = [context, story] if rng.random() < 0.4 else [story, context]
    parts = [rng.choice(OPENINGS), *body, rng.choice(CLOSINGS)]
    return " ".join(part.format(**slots) for part in parts if part)


def main() -> None:
    """Write the tickets beside this script."""
    pq.write_table(make_tickets(NUM_TICKETS), PATH, row_group_size=128)


if __name__ == "__main__":
    main()
