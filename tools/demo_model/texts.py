"""The texts that the demo model learns by heart: lists, poems, stories, and what it says about
itself.

Like ``facts``: no phrasing of questions, no randomness.
"""

from __future__ import annotations

from typing import Final

from tools.demo_model.facts import DAYS, MONTHS

LISTS: Final[dict[str, str]] = {
    "days of the week": ", ".join(DAYS),
    "months of the year": ", ".join(MONTHS),
    "seasons": "spring, summer, autumn, winter",
    "planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
    "colors of the rainbow": "red, orange, yellow, green, blue, indigo, violet",
    "letters of the alphabet": " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    "vowels": "A, E, I, O, U",
    "continents": "Africa, Antarctica, Asia, Australia, Europe, North America, South America",
    "letters of the Greek alphabet": "Α Β Γ Δ Ε Ζ Η Θ Ι Κ Λ Μ Ν Ξ Ο Π Ρ Σ Τ Υ Φ Χ Ψ Ω",
    "letters of the Russian alphabet": (
        "А Б В Г Д Е Ё Ж З И Й К Л М Н О П Р С Т У Ф Х Ц Ч Ш Щ Ъ Ы Ь Э Ю Я"
    ),
    "letters of the Japanese hiragana": (
        "あいうえお かきくけこ さしすせそ たちつてと なにぬねの "
        "はひふへほ まみむめも やゆよ らりるれろ わをん"
    ),
    "letters of the Korean alphabet": "ㄱ ㄴ ㄷ ㄹ ㅁ ㅂ ㅅ ㅇ ㅈ ㅊ ㅋ ㅌ ㅍ ㅎ",
    "Chinese numbers": (
        "一、二、三、四、五、六、七、八、九、十、十一、十二、十三、十四、十五、"
        "十六、十七、十八、十九、二十"
    ),
    "Chinese zodiac animals": "鼠、牛、虎、兔、龙、蛇、马、羊、猴、鸡、狗、猪",
    "Japanese days of the week": "月曜日、火曜日、水曜日、木曜日、金曜日、土曜日、日曜日",
    "zodiac signs": "♈ ♉ ♊ ♋ ♌ ♍ ♎ ♏ ♐ ♑ ♒ ♓",
    "moon phases": "🌑 🌒 🌓 🌔 🌕 🌖 🌗 🌘",
    "animal emoji": "🐱 🐶 🦊 🐻 🐼 🦁 🐯 🐸 🐵 🐔 🐧 🦉 🐺 🦄 🐝 🐌 🦋 🐞 🐙 🐳 🐬 🦈 🦀 🐢",
    "fruit emoji": "🍎 🍐 🍊 🍋 🍌 🍉 🍇 🍓 🍒 🍑 🥭 🍍 🥥 🥝 🍅 🥑",
}
"""Name of a list to the list, in order, as the model writes it."""

POEMS: Final[dict[str, str]] = {
    "the sea": (
        "🌊🌊🌊 🐟 🐠 🐡\n⛵ 🌊 🐳 🌊 ⛵\n🦀 🐚 🏖️ 🐚 🦀\n🌅 🌊 🐬 🌊 🌅\n"
        "🐙 🦑 🦐 🦞 🐙\n🌙 🌊 ⭐ 🌊 🌙"
    ),
    "the garden": (
        "🌱 🌿 🍀 🌷 🌹\n🐝 🌻 🦋 🌼 🐞\n🌧️ 💧 🌈 💧 ☀️\n"
        "🍓 🍒 🍎 🍐 🍑\n🐌 🍃 🐛 🍃 🐌\n🌙 🌸 ✨ 🌸 🌙"
    ),
    "the night": (
        "🌆 🌇 🌃 🌙 ⭐\n🦉 🌲 🦇 🌲 🦉\n🌌 🌠 🪐 🌠 🌌\n"
        "🛏️ 😴 💤 😴 🛏️\n🐺 🌕 🎶 🌕 🐺\n🌄 🐓 ☀️ 🐓 🌄"
    ),
    "the kitchen": (
        "🍞 🧈 🍯 🥛 ☕\n🥕 🧅 🍅 🥔 🥦\n🔪 🍳 🔥 🍲 🧂\n"
        "🍕 🍝 🍜 🍣 🥗\n🍰 🍪 🍩 🍫 🍦\n😋 🍽️ 🫖 🍽️ 😋"
    ),
    "the journey": (
        "🎒 🗺️ 🧭 👟 🚪\n🚲 🛣️ 🚗 🛣️ 🚌\n🚂 🌄 🏔️ 🌄 🚂\n✈️ ☁️ 🌍 ☁️ ✈️\n🏝️ 🌴 🥥 🌴 🏝️\n📷 💌 🏠 💗 😊"
    ),
    "spring in Chinese": ("春眠不觉晓，处处闻啼鸟。\n夜来风雨声，花落知多少。"),
    "the moon in Chinese": "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。",
    "the tower in Chinese": "白日依山尽，黄河入海流。\n欲穷千里目，更上一层楼。",
    "the deer park in Chinese": "空山不见人，但闻人语响。\n返景入深林，复照青苔上。",
    "the river snow in Chinese": "千山鸟飞绝，万径人踪灭。\n孤舟蓑笠翁，独钓寒江雪。",
    "the flowers in Japanese": (
        "いろはにほへと ちりぬるを\nわかよたれそ つねならむ\n"
        "うゐのおくやま けふこえて\nあさきゆめみし ゑひもせす"
    ),
    "the thousand characters in Chinese": (
        "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。\n寒来暑往，秋收冬藏。闰余成岁，律吕调阳。\n"
        "云腾致雨，露结为霜。金生丽水，玉出昆冈。\n剑号巨阙，珠称夜光。果珍李柰，菜重芥姜。"
    ),
    "the old pond in Japanese": "古池や\n蛙飛びこむ\n水の音",
}
"""Subject to a poem: emoji ones, and classical ones in Chinese and Japanese."""

STORIES: Final[dict[str, str]] = {
    "a fox": (
        "Once upon a time a small red fox lived under an old oak. Every morning the fox walked to "
        "the river and looked at the water. One day a boat came by with nobody in it. The fox "
        "jumped in and the river took them far away. They passed a mill, a bridge and a town full "
        "of lights. At night the fox slept under the stars. In the morning the boat stopped at "
        "the sea, and the fox smiled. The end."
    ),
    "a robot": (
        "A little robot worked in a quiet library. It put every book back in its place and never "
        "read a word. One evening a girl asked it for a story. The robot opened a blue book and "
        "read the first page, then the second, then all of them. When the sun came up the girl "
        "was asleep and the robot was still reading. Since that night the books are late, but "
        "the robot is happy. The end."
    ),
    "a baker": (
        "Long ago a baker made the best bread in the valley. He sang while he worked, and people "
        "said the song was the secret. One winter he lost his voice. The bread was flat and the "
        "valley was sad. So the children came to the bakery and sang for him, high and loud and "
        "a little wrong. The bread rose like the morning sun. The baker laughed, and his voice "
        "came back. The end."
    ),
    "the moon": (
        "The moon was tired of being alone in the sky. She asked the owl for a friend, but the "
        "owl was busy. She asked the wind, but the wind could not stay. Then a lamp in a small "
        "window stayed lit all night, because a child could not sleep. The moon looked in and "
        "the child waved. Now they wave to each other every night, and both of them sleep well. "
        "The end."
    ),
    "two mice": (
        "Two mice found a piece of cheese as big as a house. The first mouse wanted to eat it at "
        "once. The second mouse wanted to save it for the winter. They talked for one day, two "
        "days, three days. On the fourth day a cat came and sat on the cheese. Now the mice share "
        "a very small potato, and they never talk for long. The end."
    ),
    "a snail": (
        "A snail wanted to see the top of the hill. The hare said it was too far. The bird said "
        "it was too high. The snail said nothing and started to walk. Spring passed, and summer, "
        "and half of autumn. One clear day the snail stood on the top and saw the whole world, "
        "green and gold and blue. The hare came running and asked what it was like. It was worth "
        "the walk, said the snail. The end."
    ),
}
"""Subject to a short story."""

ABOUT: Final[dict[str, str]] = {
    "name": "I am the MiniSGL demo model.",
    "purpose": "I answer simple questions so that you can test the server.",
    "size": "I have a few million parameters.",
}
"""What the model says about itself."""
